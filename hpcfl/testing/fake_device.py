"""A device that is none: what GPUs ask of a program is checked where there is no GPU.

A tensor made on, or moved to, the device ``fake`` holds a CPU tensor and computes what that would. As on a GPU, it
mixes with no tensor of the CPU but numbers (0-dimensional ones), and there is no ``.numpy()``. What would make the host
wait for a GPU is counted: a number read (``.item()``, ``float()``, an ``if``), a copy that waits, shapes that depend on
values (boolean masks). What CUDA's own libraries wait for (``torch.linalg``) is not. Each operation that computes, not
a view and no mere memory, counts as one launch, and eigenvectors have the signs of another library.

It is one of torch's Python back ends, which recent versions have: `available` tells. There is no ``torch.tensor(…,
device="fake")``, in whose place stands `Tensor.to`, and no ``torch.nn.LSTM``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

NAME = "fake"
MEMORY = 2**34  # bytes that it says it has
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
COPIES = ("_to_copy", "copy_")
NO_LAUNCH = (
    "detach",
    "lift_fresh",
    "_reshape_alias",
    "_unsafe_view",
    "set_",
    "resize_",
    "is_same_size",
    "record_stream",
)

waits: Counter[str] = Counter()
"""How often the host has waited for the device, by operation."""
launches: Counter[str] = Counter()
"""How often the device was given something to compute, by operation."""
SORTING = (
    "scatter_add",
    "index_put",
    "_index_put_impl",
    "index_add",
    "index_reduce",
    "scatter_reduce",
    "cumsum",
    "put",
)
"""Operations that sort or wait where they must give the same bits each time."""


class FakeTensor(Tensor):
    """A tensor on the fake device, which holds one of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> FakeTensor:
        facts: Any = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: FakeTensor = Tensor._make_wrapper_subclass(cls, held.size(), device=torch.device(NAME, 0), **facts)
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"fake({self.held!r})"

    def record_stream(self, stream: Any) -> None:
        pass

    def tolist(self) -> Any:
        _wait("tolist", True)
        return self.held.tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Stream:
    """A stream, or an event on one; what nobody has waited for is not there yet."""

    def __init__(self, device: Any = None) -> None:
        self.asked = 0

    def synchronize(self) -> None:
        _wait("synchronize", True)
        self.asked = 1
        _deliver()

    def query(self) -> bool:
        self.asked += 1
        if self.asked > 1:
            _deliver()
        return self.asked > 1

    def wait_stream(self, other: Any) -> None:
        """Do nothing: what computes is done at once."""

    def record_event(self) -> _Stream:
        return _Stream()


class _Graph:
    """Operations that were recorded: `replay` computes them again, on the tensors that they were recorded with."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        launches["replay"] += 1
        for func, args, kwargs, results in self.operations:
            again = func(*tree_map(_held, args), **tree_map(_held, kwargs))
            for result, new in zip(tree_flatten(results)[0], tree_flatten(again)[0]):
                if isinstance(result, FakeTensor) and result.held is not new:
                    result.held.copy_(new)


@contextmanager
def _recorded(graph: _Graph, pool: Any = None) -> Iterator[None]:
    """Record within the block what the device is given; afterwards nothing of it has been computed."""
    _recording.append(graph)
    try:
        yield
    finally:
        _recording.clear()
        for _, _, _, results in graph.operations:
            for each in tree_flatten(results)[0]:
                if isinstance(each, FakeTensor) and each.held.is_floating_point():
                    each.held.fill_(torch.nan)


_recording: list[_Graph] = []


class _Device:
    """What torch asks of a device's module."""

    CUDAGraph = _Graph
    graph = staticmethod(_recorded)
    graph_pool_handle = staticmethod(lambda: (0, 0))

    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    Stream = _Stream
    current_stream = staticmethod(lambda device=None: _Stream())
    stream = staticmethod(lambda stream: nullcontext())
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = is_initialized = staticmethod(lambda: True)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=MEMORY))


def available() -> bool:
    """True where torch can be given such a device."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@cache
def registered() -> str:
    """Let torch know the device, and return its name; to be called before any backward pass of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Device)
    libraries: Any = torch.library
    _KEPT.append(libraries.Library("_", "IMPL"))
    # what makes a tensor there from nothing
    _KEPT[-1].fallback(lambda func, *args, **kwargs: _computed(func, args, kwargs), "PrivateUse1")
    _KEPT.append(libraries.Library("aten", "IMPL"))
    for overload in ("arange", "arange.start", "arange.start_step"):  # by itself it would fill one of no numbers
        _KEPT[-1].impl(overload, _arange, "PrivateUse1")
    return f"{NAME}:0"


def _arange(*ends: Any, dtype: Any = None, **_: Any) -> Any:
    return _given("arange", partial(torch.arange, dtype=dtype), ends, {}, _made(torch.arange(*ends, dtype=dtype)))


def _given(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Count, or record, what the device is given to compute, and return its result."""
    if _recording:
        _recording[0].operations.append((func, args, kwargs, result))
    else:
        launches[name] += 1
    return result


_KEPT: list[Any] = []


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count how often the host waits within the block."""
    before, found = Counter(waits), Counter[str]()
    yield found
    found.update(waits - before)


@contextmanager
def launched() -> Iterator[Counter[str]]:
    """Count within the block what the device is given to compute."""
    before, found = Counter(launches), Counter[str]()
    yield found
    found.update(launches - before)


@contextmanager
def nothing_sorted() -> Iterator[None]:
    """Refuse within the block what sorts or waits on a GPU that is to give the same bits each time."""
    _refused.update(SORTING)
    try:
        yield
    finally:
        _refused.clear()


_refused: set[str] = set()


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on what the tensors hold; RuntimeError where a GPU would refuse to."""
    name = func._schema.name.partition("::")[2]
    if name.rstrip("_") in _refused:
        raise RuntimeError(f"{name}: to give the same bits each time, a GPU sorts for it, or waits")
    computes = not (func.is_view or name in NO_LAUNCH or name.startswith(("empty", "new_empty")))
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    fake = [each for each in tensors if isinstance(each, FakeTensor)]
    host = [each for each in tensors if not isinstance(each, FakeTensor) and each.dim()]
    to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else NAME
    late = False
    if name in COPIES:
        into = _place(args[0]) if name == "copy_" else to
        crosses, later = {*map(_place, tensors), into} != {into}, kwargs.get("non_blocking") or args[2:] == (True,)
        _wait(name, crosses and not later)
        if crosses and _recording:
            raise RuntimeError("a copy between host and device cannot be recorded")
        late = crosses and bool(later) and into == "cpu"
    elif name in INDEXED:
        indices = [each for each in args[1] if each is not None]
        _wait("mask", any(each.dtype in (torch.bool, torch.uint8) for each in indices))
        _wait("index from the host", any(_place(each) == "cpu" and each.dim() for each in indices))
        _refuse_mixing(name, fake, [each for each in host if not any(each is index for index in indices)])
    else:
        _wait(name, name in READS)
        _refuse_mixing(name, fake, host)
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if name == "_linalg_eigh":
        out = out[0], -out[1]
    if late:
        with _one_thread:  # another may wait for an event meanwhile
            _under_way.append((out, out.clone()))
            out.fill_(torch.nan if out.is_floating_point() else 0)
    if name.startswith("__i") if name.startswith("__") else name.endswith("_"):  # in place; others are __rshift__, …
        result = args[0] if func._schema.returns else None
    else:
        result = tree_map(_made, out) if to == NAME else out
    return _given(name, func, args, kwargs, result) if computes else result


_under_way: list[tuple[Tensor, Tensor]] = []
"""Tensors of the CPU, and what they are still to be given."""


_one_thread = Lock()


def _deliver() -> None:
    with _one_thread:
        while _under_way:
            to, value = _under_way.pop(0)
            to.copy_(value)


def _place(tensor: Tensor) -> str:
    return NAME if isinstance(tensor, FakeTensor) else "cpu"


def _wait(name: str, waited: bool) -> None:
    if waited and _recording:
        raise RuntimeError(f"{name}: what the host waits for cannot be recorded")
    if waited:
        waits[name] += 1


def _refuse_mixing(name: str, fake: list[FakeTensor], host: list[Tensor]) -> None:
    if fake and host:
        shapes = [tuple(each.shape) for each in host]
        raise RuntimeError(f"{name}: expected all tensors on the device {NAME}:0, found some on the CPU: {shapes}")


def _held(each: Any) -> Any:
    if isinstance(each, torch.device):
        return torch.device("cpu") if each.type == NAME else each
    return each.held if isinstance(each, FakeTensor) else each


def _made(each: Any) -> Any:
    return FakeTensor(each) if isinstance(each, Tensor) and not isinstance(each, FakeTensor) else each
