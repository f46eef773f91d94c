"""Files and folders: safetensors checkpoints, PEFT adapters, manifests, the Hub. No torch anywhere in here."""
