"""Derivatives that few methods ask for: each sample's own gradient, and Hessians times vectors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpcfl.base.types import State
from hpcfl.learning.batches import Batch
from hpcfl.learning.task import Task


def per_sample_gradients(task: Task, params: State, batch: Batch) -> State:
    """Every sample's own gradient, ``{name: [n, …]}``, at ``{name: […]}``, of one client's batch ``[1, n, …]``."""

    def loss(params: State, x: Tensor, y: Tensor) -> Tensor:
        one = {name: value.unsqueeze(0) for name, value in params.items()}
        return task.losses(one, Batch(x[None, None], y[None, None], None, batch.key)).squeeze(0)

    task.count(batch)
    # the first call loads SymPy, by a check in torch's decomposition of the cross-entropy under vmap(grad); other ways
    # that were tried change the last bits
    gradients: State = vmap(grad(loss), in_dims=(None, 0, 0))(params, batch.x.squeeze(0), batch.y.squeeze(0))
    return gradients


def hessian_vector_product(task: Task, params: State, batch: Batch, vector: State) -> State:
    """Each client's Hessian times its vector, ``{name: [c, …]}``, by double backpropagation.

    It counts as two gradients for each sample: of the loss, and of that gradient's part along the vector.
    """
    task.count(batch, calls=2)
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
        losses = task.losses(leaves, batch)
    skips = task.whole is not None  # a module may leave a part out of a step
    first = torch.autograd.grad(losses.sum(), list(leaves.values()), create_graph=True, materialize_grads=skips)
    slopes = [(gradient * vector[name]).sum() for name, gradient in zip(leaves, first)]
    second = torch.autograd.grad(torch.stack(slopes).sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, second))
