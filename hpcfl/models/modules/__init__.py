"""What models are made of. It imports torch, which a check of the config is not to load: so it lies in a folder."""
