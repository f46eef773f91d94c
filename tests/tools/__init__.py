"""Commands for those who work on msa-lite: pages, pictures, a fuzzer, what runs the docs, a model of GPU memory."""
