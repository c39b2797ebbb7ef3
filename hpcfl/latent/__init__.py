"""FLIC's latent space, for `hpcfl.algorithms.flic`, which has the protocol.

keys: the keys of the algorithm, and which go together. parts: whose each layer is (φ, α, β). anchors, targets: anchors
of classes and of real labels. objective: what is minimised. learner: the phases of a visit. reduction: barycenters by
further sums.
"""
