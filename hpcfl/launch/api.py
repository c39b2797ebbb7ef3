"""Runs from Python: what ``hpcfl run`` does, for scripts and notebooks, alone or on all ranks of an MPI job."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcfl import store
from hpcfl.algorithms.base import Algorithm
from hpcfl.base import notebook
from hpcfl.base.errors import ErrorOnOtherRank, RunError, Stopped, StoppedBefore, UsageError
from hpcfl.base.lazy import Tensor, torch, xarray
from hpcfl.base.memory import LARGE_PAGES
from hpcfl.config import Config, Overlay
from hpcfl.engine import stopping
from hpcfl.launch import given, saved
from hpcfl.launch.request import RunRequest, default_folder, resume_request, run_request
from hpcfl.launch.run import launch
from hpcfl.mpi.cores import cores
from hpcfl.mpi.devices import VISIBLE
from hpcfl.mpi.launcher import world
from hpcfl.results.card import card
from hpcfl.results.trained import Models, NotHereError, open_models, shared_weights

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, eq=False)
class Run:
    """A run that has ended: what it recorded and the models that it left, read when they are first asked for.

    Attributes
    ----------
    folder : Path
        The run folder.
    data_dir : Path or None
        Folder of the data sets; None: where the run found them.
    force : bool
        Take files and classes from outside that have changed as they are.
    trust : bool
        Import the code that the folder names, whoever has sent it.
    """

    folder: Path
    data_dir: Path | None = None
    force: bool = False
    trust: bool = False

    @cached_property
    def data(self) -> xarray.Dataset:
        """What was recorded, by round and client, as `hpcfl.open_run` returns it."""
        return store.open_run(self.folder)

    @cached_property
    def models(self) -> Models:
        """The clients' models at the end, as `hpcfl.open_models` returns them."""
        return open_models(self.folder, self.data_dir, force=self.force, trust=self.trust)

    def _repr_html_(self) -> str:
        return card(self.folder.name, self.data)

    def module(self, client: int | None = None) -> torch.nn.Module:
        """Return the trained model as a plain module, set to evaluate: the shared one, or a client's own.

        Raises
        ------
        UsageError
            Without `client` if the method shares only some of the layers.
        """
        return self.models.module(client)

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return the parameters by the names that they have in `module`; UsageError as there.

        Of a module of the user's own whose code is not here, those that are shared are what the checkpoint has: without
        what never changes, tied ones by their first name alone. A line on stderr says so.
        """
        try:
            return dict(self.module(client).state_dict())
        except NotHereError as error:
            if client is not None:
                raise
            return shared_weights(self.folder, str(error))


def run(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    algorithm: str | type[Algorithm] | None = None,
    model: str | Callable[..., Any] | None = None,
    loss: str | Callable[..., Any] | None = None,
    data: Any = None,
    by: str | None = None,
    label: str | None = None,
    test_share: float = 0.2,
    speeds: Any = None,
    out: Path | str | None = None,
    overlays: Overlay | Iterable[Overlay] = (),
    settings: Mapping[str, Any] | None = None,
    data_dir: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_round: Callable[[Mapping[str, float]], Any] | None = None,
    force: bool = False,
    quiet: bool | None = None,
    comm: Any = None,
    allow_mixed: bool = False,
    trust: bool = False,
) -> Run:
    """Carry out a run, as ``hpcfl run`` does, and return what it left.

    A class or function that the script or notebook has defined is kept as source in ``code`` of the run folder, with
    what it uses: `resume` and other ranks take it from there. Others are named by their module.

    In a script that ``mpirun`` or ``srun`` has started this is collective: all ranks call it alike, and all get the
    same `Run` or the same exception. Signals TERM, INT and USR1 ask the run to stop meanwhile. Signal handlers, thread
    counts, environment, torch's flags and its global random state are afterwards what they were before.

    Parameters
    ----------
    config : str, Path, mapping or Config
        A preset's name, a TOML file, nested tables as in one, or a `Config`.
    algorithm : str or type, optional
        A method's name, or a class derived from `hpcfl.Algorithm`, in the place of the config's.
    model : str or callable, optional
        A model's name, or a class derived from ``torch.nn.Module`` or a function that makes a module. It is called with
        ``shape`` and ``classes`` where it takes these, and with keys of ``[model]``.
    loss : str or callable, optional
        A loss's name, or a function ``(outputs, labels) -> Tensor [B]``.
    data : str, Path, arrays, datasets or DataFrame, optional
        Data in the place of the config's: a source's name, an HDF5 file, or what `hpcfl.save_data` takes, up to 100 MB,
        which the run folder then keeps. As many `clients` as it has take part.
    by, label, test_share
        As `hpcfl.save_data` takes them.
    speeds : str, Path, DataFrame or mapping, optional
        How long visits take: a speed model's name, a CSV file, a table with columns ``client,seconds`` (or as
        ``speed.file`` has them), or seconds by client; clients by number, or by the names that `data` has.
    out : Path or str, optional
        The run folder; None: ``runs/<name>``, that of the file or preset, otherwise of the method.
    overlays : str, Path or mapping, or several
        Partial configs whose keys are merged onto `config`, as by ``--with``: TOML files, names of overlays or nested
        tables.
    settings : mapping of str to value, optional
        Keys on top of these, dotted as in ``{"algorithm.lr": 0.1}``.
    data_dir : Path or str, optional
        Folder of the data sets; None: what HPCFL_DATA says.
    resume : bool
        Go on with the run that the folder already holds; without it such a folder is refused.
    overwrite : bool
        Remove the run that the folder already holds, if this one can begin.
    on_round : callable, optional
        Called after each round, at rank 0, with its figures by name: ``round``, ``invited``, ``arrived``,
        ``sim_seconds``, ``wall_seconds``, ``loss`` where any is known, and where the round was tested ``accuracy`` (or
        ``mean_client_accuracy``) and ``test_loss``. Where it returns something true, the run stops after the round;
        ``resume=True`` goes on.
    force : bool
        Go on even if the run seems to be running on a host that is gone, and with files of the user's that have changed
        since it began.
    quiet : bool, optional
        Show no progress; None: none unless the output is a terminal or a notebook.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part; None: all that a launcher has started, otherwise this process alone.
    allow_mixed : bool
        Run though ranks have other versions of hpcfl, torch, NumPy or Python; rank 0's says whether.
    trust : bool
        With `resume`: import the code that the folder names, though it has not run here.

    Raises
    ------
    UsageError
        If the config, the data or the folder cannot be used; nothing was run.
    RunError
        If the run could not go on.
    Stopped
        If it was asked to stop; a checkpoint was written, and ``resume=True`` goes on. `Diverged`, which is one, has
        none.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> run.data["accuracy"].sizes["round"]
    2
    >>> sum(weight.numel() for weight in run.module().parameters())
    2778
    """
    folder = Path(out) if out else default_folder(config)
    place, silent = _place(data_dir), _silent(quiet)
    own = {"algorithm.name": algorithm, "model.name": model, "task.loss": loss}
    more = {"quiet": silent, "overwrite": overwrite}

    def decide() -> RunRequest | None:
        with saved.keeping(folder):
            keys, modules = written_down(folder, own, settings, data, by, label, test_share, speeds)
            request = run_request(config, keys, folder, place, resume, force, overlays, trust, **more)
        return request and request.model_copy(update={"modules": modules})

    _carried_out(decide, comm, allow_mixed, on_round)
    return Run(folder, place, force, trust)


def written_down(
    folder: Path,
    own: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    data: Any,
    by: str | None,
    label: str | None,
    test_share: float,
    speeds: Any,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings with keys for the objects of a script, and the modules that hold the source of its own by key.

    Data and speeds are kept in a folder, the rest is as of `run`.
    """
    named = {key: given.named(each, key) for key, each in own.items() if each is not None}
    modules = {name: source for _, several in named.values() for name, source in several.items()}
    given.written(modules)
    names, keys = list[str](), dict[str, Any]()
    if data is not None:
        keys["data"], names = saved.data_section(folder, data, by, label, test_share)
        keys |= {"clients": len(names)} if names else {}
    if speeds is not None:
        keys["speed"] = saved.speed_section(folder, speeds, names)
    return {**keys, **(settings or {}), **{key: name for key, (name, _) in named.items()}}, modules


def resume(
    folder: Path | str,
    *,
    rounds: int | None = None,
    data_dir: Path | str | None = None,
    on_round: Callable[[Mapping[str, float]], Any] | None = None,
    force: bool = False,
    quiet: bool | None = None,
    comm: Any = None,
    allow_mixed: bool = False,
    trust: bool = False,
) -> Run:
    """Go on with a run after its newest checkpoint, as ``hpcfl resume`` does; all else is as of `run`.

    Parameters
    ----------
    folder : Path or str
        The run folder.
    rounds : int, optional
        The rounds that the run has from now on, finished or not; None: as before.

    Examples
    --------
    >>> run = hpcfl.run("fedavg-digits", settings={"rounds": 2, "evaluate.every": 1}, out="runs/two", quiet=True)
    >>> hpcfl.resume("runs/two", rounds=3, quiet=True).data.sizes["round"]
    3
    """
    place, where = _place(data_dir), store.run_folder(folder)

    def decide() -> RunRequest | None:
        return resume_request(where, place, force, rounds, trust, quiet=_silent(quiet))

    _carried_out(decide, comm, allow_mixed, on_round)
    return Run(where, place, force, trust)


def _place(data_dir: Path | str | None) -> Path | None:
    known = data_dir or os.environ.get("HPCFL_DATA")
    return Path(known) if known else None


def _silent(quiet: bool | None) -> bool:
    return not (sys.stdout.isatty() or notebook.display()) if quiet is None else quiet


def _carried_out(
    decide: Callable[[], RunRequest | None],
    comm: Any,
    allow_mixed: bool,
    on_round: Callable[[Mapping[str, float]], Any] | None,
) -> None:
    """Carry out what rank 0 decides on all ranks, and leave the process as it was."""
    with _left_as_it_was():
        comm = world() if comm is None else comm
        try:
            launch(decide, comm, from_python=True, allow_mixed=allow_mixed, on_round=on_round)
        except StoppedBefore as error:
            raise Stopped(0, str(error)) from None
        except ErrorOnOtherRank as other:
            if other.code == Stopped.code:
                raise Stopped(0, other.line) from None
            kind = UsageError if other.code == UsageError.code else RunError
            raise kind(other.line) from None


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Note signals within the block; undo afterwards what runs set for the whole process.

    A run leaves its data behind in cycles. Python's collector seldom comes by, so it is called: with what was there
    before out of its sight, that takes a millisecond.
    """
    environ = {name: os.environ.get(name) for name in (THREADS, LARGE_PAGES, VISIBLE)}
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0
    frozen = gc.get_freeze_count()
    gc.freeze()
    stopping.install()
    try:
        yield
    finally:
        stopping.uninstall()
        gc.collect()
        if not frozen:
            gc.unfreeze()
        for name, value in environ.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if "torch" in sys.modules:
            torch.set_num_threads(threads or int(environ[THREADS] or len(cores())))
