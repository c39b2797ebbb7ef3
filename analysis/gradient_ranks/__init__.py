"""Approximate rank of a loss's gradient over samples and parameters (Jadbabaie et al., FedLRGD, appendix C).

What analysis/gradient_rank.py computes with: the network, how it is trained, single derivatives and the ranks of their
matrices, the work shared out among ranks, and the file that holds a study.
"""
