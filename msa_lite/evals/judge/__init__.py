"""Ask a language model whether generated answers are right."""
