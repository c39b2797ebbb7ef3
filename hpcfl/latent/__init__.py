"""FLIC's latent space: which layers are whose, anchors, and the terms of the objective. Knows no algorithm by name."""
