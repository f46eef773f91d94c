"""Hand a model or adapter on to the Hugging Face Hub: what may be sent, where it goes, and how it gets there whole."""
