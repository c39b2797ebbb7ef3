"""The commands. Exit codes: 0 done, 1 failed, 2 bad usage or config, 85 stopped on request after a checkpoint.

Each command imports what it needs: options are judged, and signals noted, before anything heavy is loaded.
"""

from __future__ import annotations

import faulthandler
import json
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import reduce
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click

from hpcfl.base import terminal
from hpcfl.base.blame import blaming
from hpcfl.base.console import print_table, terminal_width
from hpcfl.base.errors import ErrorOnOtherRank, RunError, Stopped, UsageError, UserError
from hpcfl.base.terminal import say
from hpcfl.commands.contributed import contributed
from hpcfl.engine import stopping

PATH = click.Path(path_type=Path)
FOLDERS = click.argument("folders", nargs=-1, required=True, type=PATH)


def _flag(*name_and_help: str) -> Callable[[Any], Any]:
    return click.option(*name_and_help[:-1], is_flag=True, help=name_and_help[-1])


DATA_DIR = click.option(
    "--data-dir", type=PATH, envvar="HPCFL_DATA", help="Folder of the data sets, one folder each (or HPCFL_DATA)."
)
SETTINGS = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the config.")


def _listed(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[list[str]]:
    """Return the names in each FILE[,FILE...]."""
    lists = [[name.strip() for name in value.split(",")] for value in values]
    for value, names in zip(values, lists):
        if not all(names):
            raise UsageError(f"--with {value}: expected FILE[,FILE...]")
    return lists


def _overlays(**more: Any) -> Callable[[Any], Any]:
    return click.option("--with", "overlays", multiple=True, metavar="FILE[,FILE...]", **more)


def _names(*given: Any) -> list[str]:
    return [name for names in _listed(*given) for name in names]


OVERLAYS = _overlays(
    callback=_names,
    help="Merge the keys of a TOML file, or of one that hpcfl list overlays names, onto the config, before --set.",
)
FORCE = _flag("--force", "Go on even if the run seems to be running on a host that is gone.")
TRUST = _flag("--trust", "Import the code that the run folder names, now and later.")
MIXED = _flag("--allow-mixed", "Run though ranks have other versions of hpcfl, torch, NumPy or Python.")
AS_JSON = _flag("--json", "as_json", "One JSON object per run.")


def _several(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what gives a command these options, in this order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


CONFIG = _several(click.argument("config"), OVERLAYS, SETTINGS)
STARTS = _several(
    _flag("--quiet", "No progress."),
    _flag("--profile", "At the end, print where each rank's time went, as a table and one line of JSON."),
    *(FORCE, TRUST, MIXED),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@_flag("--debug", "Show tracebacks of errors in usage too.")
@click.version_option(package_name="hpcfl")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Federated learning as an ordinary MPI batch job.

    hpcfl run fedavg-digits runs a first example in seconds; hpcfl list says what else there is.
    """
    if context.invoked_subcommand is None:
        _echo([context.get_help()])


@cli.command()
@CONFIG
@click.option("--out", type=PATH, help="Run folder (default: runs/<name of the config>).")
@DATA_DIR
@_flag("--resume", "Go on if the folder already holds a run of this config.")
@_flag("--overwrite", "Remove the run that the folder already holds, if this one can begin.")
@STARTS
def run(**options: Any) -> None:
    """Run CONFIG, a TOML file or a preset's name; the same alone, under mpirun and under srun."""
    _launch("run_request", **options)


@cli.command()
@click.argument("folder", type=PATH)
@click.option(
    "--rounds", type=click.IntRange(min=1), metavar="N", help="Let the run have N rounds from now on, finished or not."
)
@DATA_DIR
@STARTS
def resume(**options: Any) -> None:
    """Go on with a run after its newest checkpoint that can be read whole, on any number of ranks."""
    _launch("resume_request", **options)


def _launch(decided: str, allow_mixed: bool, **options: Any) -> None:
    """Carry out what a function of `hpcfl.launch.request` decides by these options."""
    stopping.install()
    from hpcfl.launch import request, run
    from hpcfl.mpi.launcher import world

    comm = world()
    with suppress(ValueError, OSError):  # there may be no file behind stderr
        faulthandler.enable()  # a crash leaves Python's lines; MPI has set its own handlers before
    run.launch(lambda: getattr(request, decided)(**options), comm, allow_mixed=allow_mixed)


@cli.command()
@click.argument("configs", nargs=-1, required=True)
@click.option("--out", type=PATH, required=True, help="Folder of the run folders and their logs.")
@_overlays(callback=_listed, help="A run for each of these overlays; with several lists, for each of each list.")
@SETTINGS
@click.option("--grid", multiple=True, metavar="KEY=V1,V2,...", help="A run for each value of a key.")
@click.option("--seeds", metavar="SEEDS", help="A run for each seed: 1,2,3 or 1-3.")
@click.option("--jobs", type=click.IntRange(min=1), help="Runs at a time (default: 1, with --pack all that have room).")
@click.option("--launcher", default="", metavar="COMMAND", help="What starts each run, as in 'mpirun -n 4'.")
@click.option(
    "--pack",
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="Each run on RANKS ranks, side by side in this allocation of Slurm.",
)
@_flag("--list", "listing", "Print index, state, folder and command of each run; nothing runs.")
@click.option("--only", type=int, metavar="INDEX", help="Only this one of the list.")
@DATA_DIR
@FORCE
@TRUST
@MIXED
def sweep(jobs: int | None, launcher: str, pack: int | None, listing: bool, only: int | None, **options: Any) -> None:
    """Run every CONFIG with all of --with, --grid and --seeds: finished runs are skipped, others gone on with."""
    from hpcfl.base.plugins import told
    from hpcfl.commands import sweep as sweeps

    instead = "which belongs before each of its runs: expected hpcfl sweep ... --launcher 'mpirun -n 4'"
    _check_alone("sweep", instead)  # or each rank would start every run
    before, room = sweeps.started_by(launcher, pack, jobs)
    runs = sweeps.picked(sweeps.runs(**options), only)
    with told(say):
        sweeps.check(runs, options["data_dir"])
    if not listing:
        sys.exit(sweeps.carry_out(runs, room, before))
    _echo(each.line(before) for each in runs)


@cli.command()
@FOLDERS
@_flag("--wait", "Return when they have stopped.")
@click.option(
    "--patience",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="With --wait: seconds after which a run that writes nothing is given up.",
)
def stop(folders: tuple[Path, ...], wait: bool, patience: float) -> None:
    """Ask running runs to stop after the round they are in; `hpcfl resume` goes on with them.

    A run whose batch job is queued again ends when that starts.
    """
    stopping.stop(folders, patience if wait else None)


@cli.command()
@click.option(
    "--json",
    "json_to",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="One JSON object: as the last line, or written to FILE.",
)
@_flag(
    "--launcher", "Print only what starts ranks of the MPI that mpi4py loads: mpiexec, or srun within a job of Slurm."
)
@_flag("--network", "Measure, in about 20 seconds, what messages between the server and the other ranks cost.")
@_flag("--site", "Print what there is for jobs: scheduler, MPI, GPUs, disks, modules; and what is lacking.")
@click.option("-o", "script", type=PATH, metavar="FILE", help="With --site: write a job script, by the options below.")
@click.option("--scheduler", type=click.Choice(("slurm", "pbs", "flux")), help="Whose script (default: the one found).")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes of the job (default: 1).")
@click.option("--ranks-per-node", "ranks", type=click.IntRange(min=1), help="Ranks on each (default: 5, or by GPUs).")
@click.option("--gpus-per-node", "gpus", type=click.IntRange(min=1), help="GPUs on each (default: none).")
@click.option("--time", help="Time limit, HH:MM:SS, after which the job goes on anew (default: 01:00:00).")
@click.option("--stage", type=PATH, metavar="TAR", help="Copy the environment in TAR, and HPCFL_DATA, to nodes' disks.")
@_flag("--server-apart", "apart", "The server on a node of its own beside --nodes, without a GPU (not under Flux).")
def doctor(json_to: str | None, launcher: bool, network: bool, site: bool, script: Path | None, **job: Any) -> None:
    """Print what a launch looks like from the inside, and the traps in it; alone, under mpirun and under srun."""
    from hpcfl.commands import site as sites
    from hpcfl.mpi.launcher import starter, world

    if launcher + network + site > 1:
        raise UsageError("hpcfl doctor: --launcher, --network and --site tell of different things: expected one")
    if (script or any(job.values())) and not (site and script):
        raise UsageError(
            "hpcfl doctor: a job script is written by --site -o FILE: expected both, with options of a job"
        )
    if script:
        _echo([sites.write(script, **job)])
    elif site:
        _check_alone("doctor --site", "but looks at what can start one: expected it without mpirun")
        found = sites.look()
        _echo(_told(json_to, asdict(found) | {"lacking": [*sites.lacking(found)]}, sites.report(found)))
    elif launcher:
        _check_alone("doctor --launcher", "but says what to start one with: expected it without mpirun")
        words = starter()
        _echo(_told(json_to, words, [shlex.join(words)]))
    elif network:
        measured = contributed("network")(world(), Path(json_to or "-"))
        if measured is not None:
            print_table(measured[0])
            _echo(_told(json_to, measured[1], []))
    else:
        from hpcfl.commands import doctor as doctors

        if (facts := doctors.examine(world())) is not None:
            _echo(_told(json_to, doctors.as_object(facts), doctors.report(facts)))


def _told(json_to: str | None, found: object, lines: list[str]) -> list[str]:
    """Return the lines to print: those, or what was `found` as JSON, which may also go to a file."""
    if json_to == "-":
        return [json.dumps(found)]
    if json_to is not None:
        from hpcfl.store.atomic import replace

        try:
            with replace(Path(json_to)) as new:
                new.write_text(json.dumps(found) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunError(f"--json '{json_to}': {error.strerror}") from None
    return lines


@cli.command()
@CONFIG
@DATA_DIR
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="State placement and memory for so many MPI ranks (default: 1, in wall clock one per client).",
)
@click.option(
    "--like",
    type=PATH,
    metavar="FILE",
    help="Also predict a round's messages on --ranks, by what hpcfl doctor --network --json FILE has measured.",
)
@click.option(
    "--per-host", type=click.IntRange(min=1), help="Ranks on each host, with --like (default: as many as measured)."
)
def check(
    config: str, data_dir: Path | None, ranks: int | None, like: Path | None, per_host: int | None, **keys: Any
) -> None:
    """Validate CONFIG and print what it would do; nothing runs but the files of yours that it names."""
    from hpcfl.base.plugins import told
    from hpcfl.commands.check import report
    from hpcfl.config import load

    if per_host is not None and like is None:
        raise UsageError("--per-host says where the ranks of a prediction are: expected --like FILE with it")
    measured = None if like is None else contributed("other ranks")(like, ranks, per_host)
    with told(say):
        loaded = load(config, **keys, tell=True, data_dir=data_dir)
        header = loaded.check(data_dir)
    if measured is not None:
        measured.check(loaded)
    _echo(report(loaded, header, data_dir, ranks or (1 + loaded.clients if loaded.clock == "wall" else 1), measured))


@cli.command()
@CONFIG
@DATA_DIR
def optimum(config: str, data_dir: Path | None, **keys: Any) -> None:
    """Find the minimum of CONFIG's objective over all training samples, and print it as one JSON object."""
    from hpcfl.config import load

    found = contributed("optimum")(load(config, **keys, tell=True, data_dir=data_dir), data_dir)
    _echo([json.dumps(found.facts())])


@cli.command()
@FOLDERS
@AS_JSON
@_flag("--each", "A row for each run, not for each config over its seeds.")
@_flag("--groups", "Also how the fast, the middle, the slow third and the worst tenth fare.")
def show(folders: tuple[Path, ...], as_json: bool, each: bool, groups: bool) -> None:
    """Print what runs came to: rounds, accuracy, times, who arrived, digest of the state.

    FOLDERS are runs, or folders of runs, such as a sweep's. Runs that differ in nothing but the seed are one row: mean
    ± standard deviation over the seeds.
    """
    from hpcfl.commands.show import remarks, summaries, table
    from hpcfl.results import run_table

    rows, odd = summaries(run_table.run_folders(folders), groups)
    tables = [] if as_json else table(rows, each, terminal_width())
    if groups and not as_json:
        tables.append(run_table.table([Path(row["run"]) for row in rows], [row["groups"] for row in rows]))
    for shown in tables:
        print_table(shown)
    _echo(map(json.dumps, rows) if as_json else remarks(rows))
    for line in odd:
        say(line)
    if odd:
        sys.exit(RunError.code)


@cli.command()
@click.argument("folder", type=PATH)
@click.option(
    "--client", "chosen", metavar="ID[,ID...]|all", help="Who adapts (default: who was held out, or never took part)."
)
@click.option(
    "--epochs",
    metavar="N[,N...]",
    help="Passes over their training data (default: tune_epochs); of several numbers, tested after each.",
)
@click.option("--data", "newcomers", type=PATH, metavar="FILE.h5", help="Who adapts is in this file, not in the run.")
@DATA_DIR
@_flag("--json", "as_json", "One JSON object.")
@click.option("--out", type=PATH, metavar="FILE.h5", help="Write the layers that learned, as HDF5.")
@TRUST
def adapt(as_json: bool, **options: Any) -> None:
    """Let clients that never took part in a run learn their personal layers on its shared ones, and test them."""
    from hpcfl.commands.adapt import adapt_request, adapted, headline, table

    _check_alone("adapt", "but is one process: expected it without mpirun")
    outcome = adapted(adapt_request(**options))
    _echo([json.dumps(outcome) if as_json else headline(outcome)])
    if not as_json:
        print_table(table(outcome))


@cli.command()
@FOLDERS
@click.option("-o", "--output", type=PATH, default=Path("accuracy.png"), show_default=True, help="The picture.")
@click.option(
    "--kind",
    default="curve",
    show_default=True,
    help="curve, groups, participation, depth, staleness, fairness, time-to-target or where-time-went.",
)
@click.option(
    "--x", multiple=True, metavar="AXIS", help="rounds, time or bytes: a panel for each (default: the first two)."
)
@click.option("--y", metavar="METRIC", help="What is drawn: accuracy, test_loss, or another number that is recorded.")
@click.option("--color", metavar="KEY", help="A colour for each value of a key (default: for each config).")
@click.option("--style", metavar="KEY", help="Dashes for each value of a key.")
@click.option("--facet", metavar="KEY", help="A panel for each value of a key.")
@click.option("--label", "labels", multiple=True, metavar="VALUE=WORDS", help="Words for a value, a key or a name.")
@click.option("--order", metavar="VALUE,...", help="Values in the order in which they are to be.")
@click.option("--clients", help="all, worst-decile (in each round anew), slow-third, middle-third or fast-third.")
@click.option("--band", help="sd: standard deviation over seeds (default); ci95: 95 % interval of the mean.")
@click.option("--last", help="all: a line is drawn where all its seeds are (default); any: where any is.")
@click.option(
    "--log", multiple=True, metavar="AXIS", help="Make logarithmic what lies along x (rounds, time ...), or y."
)
@click.option(
    "--width",
    type=click.Choice(["column", "page"]),
    help="3.3 inches, panels below each other, or 6.75, side by side (default: column for PDF, else page).",
)
@click.option("--target", type=float, help="What the metric is to reach, for time-to-target.")
@_flag("--any-data", "Draw runs on different data in one panel.")
def plot(folders: tuple[Path, ...], output: Path, x: tuple[str, ...], **how: Any) -> None:
    """Draw accuracy, or another metric, against rounds and against time; or another kind of figure.

    FOLDERS are runs, or folders of runs, such as a sweep's. Runs that differ in nothing but the seed are one line: the
    mean over the seeds, with a band. The same options are those of hpcfl.figure in Python.
    """
    from hpcfl.commands.plot import plot as draw

    draw(folders, output, x=x or None, **how)
    _echo([str(output)])


@cli.command()
@click.argument("folders", nargs=-1, type=PATH)
@click.option("--replay", type=PATH, metavar="RUN", help="Run what RUN was with each of --with, on its seconds.")
@_overlays(callback=_names, help="Of --replay: what else a run has, each by itself.")
@click.option("--out", type=PATH, metavar="FOLDER", help="Of --replay: the folder of the runs; default RUN-replayed.")
@DATA_DIR
@click.option("--target", type=float, metavar="VALUE", help="Also when runs reached it, as in --target 0.9.")
@click.option("--metric", default="accuracy", show_default=True, help="A metric's name, or test_loss.")
@click.option(
    "--as",
    "form",
    type=click.Choice(["table", "markdown", "latex", "csv", "json"]),
    default="table",
    show_default=True,
    help="How it is written; csv and json have plain numbers.",
)
def compare(
    folders: tuple[Path, ...],
    replay: Path | None,
    overlays: tuple[str, ...],
    out: Path | None,
    data_dir: Path | None,
    target: float | None,
    metric: str,
    form: str,
) -> None:
    """Print when runs reached a target, how their clients fare at the end, and what they cost.

    FOLDERS are runs, or folders of runs, such as a sweep's. Runs that differ in nothing but the seed are one row: the
    median time to the target with its interval by the bootstrap, else mean ± standard deviation.
    """
    from hpcfl.results import targets

    if replay is not None:
        from hpcfl.commands.replay import replayed

        folders += tuple(replayed(replay, overlays, out or Path(f"{replay}-replayed"), data_dir))
    elif overlays or out:
        raise UsageError("hpcfl compare: --with and --out are for --replay RUN")
    if not folders:
        raise UsageError("hpcfl compare: expected FOLDERS, or --replay RUN --with NAME")
    found = targets.compare(folders, target, metric=metric)
    if form == "table":
        print_table(targets.printed(targets.worded(found, metric, target), terminal_width()))
        return
    plain = form in ("csv", "json")
    print(targets.written(found if plain else targets.worded(found, metric, target), form), end="", flush=True)


@cli.command()
@click.argument("folder", type=PATH)
@click.option("--to", required=True, type=PATH, metavar="FILE", help="run.zip, or model.safetensors.")
@click.option("--client", type=click.IntRange(min=0), help="Whose model (default: the shared one).")
def export(folder: Path, to: Path, client: int | None) -> None:
    """Write a run to one file that all commands read, without its data; or the weights of its model."""
    from hpcfl.launch.export import export as write

    _echo([str(write(folder, to, client=client))])


@cli.command()
@FOLDERS
@_flag("--force", "Even if the run seems to be running on another host.")
def seal(folders: tuple[Path, ...], force: bool) -> None:
    """Make run folders readable by any HDF5 or netCDF-4 program, also after a kill."""
    from hpcfl import store

    for folder in folders:
        store.seal(folder, force)


@cli.command()
@FOLDERS
@AS_JSON
def verify(folders: tuple[Path, ...], as_json: bool) -> None:
    """Read every byte of run folders, or of folders of runs, and name the files that are not as they were written."""
    from hpcfl.commands.verify import as_object, lines, verified

    found = verified(folders)
    _echo(line for each in found for line in ([json.dumps(as_object(*each))] if as_json else lines(*each)))
    if any(findings.damaged for _, findings in found):
        sys.exit(RunError.code)


@cli.command()
@click.argument("get", required=False, type=click.Choice(["get"]))
@click.argument("name", required=False)
@DATA_DIR
def data(get: str | None, name: str | None, data_dir: Path | None) -> None:
    """Print the data sources that there are, and whether their files are here.

    get NAME: which files it reads, where they are published, under what licence, and where they are here; exit code 1
    if one lacks. Nothing is downloaded.
    """
    from hpcfl.commands import data_sets

    if name is None:
        if get:
            raise UsageError("hpcfl data get: expected a NAME of those that hpcfl data lists")
        print_table(data_sets.overview(data_dir))
        return
    lines, whole = data_sets.report(name, data_dir)
    _echo(lines)
    if not whole:
        sys.exit(RunError.code)


@cli.group()
def speeds() -> None:
    """Find the law that measured seconds follow, or show what a config's speeds come to."""


@speeds.command()
@click.argument("file", type=PATH)
@click.option("--column", metavar="NAME", help="Column of the seconds; of other units by its end: _ms, _us, _min, _h.")
@click.option("--by", multiple=True, metavar="NAME", help="Column that says whose a row is (default: client).")
@_flag("--json", "as_json", "One JSON object alone.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Draw values, laws and lags: .png, .pdf or .svg.")
def fit(file: Path, column: str | None, by: tuple[str, ...], as_json: bool, output: Path | None) -> None:
    """Compare laws of the seconds in a CSV FILE; print a section [speed] to paste, and one JSON object last.

    Rows of one client are in the order of time: from them follows how long it stays slow.
    """
    if output is not None:
        from hpcfl.commands.plot import check_kind, save

        check_kind(output)
    module = contributed("speeds")
    found = module.fit(file, column, by)
    if not as_json:
        table, *lines = module.told(found)
        print_table(table)
        _echo(lines)
    if output is not None:
        save(module.picture(found, file, by), output)
    _echo([json.dumps(found)])


@speeds.command("show")
@CONFIG
@DATA_DIR
def show_speeds(config: str, data_dir: Path | None, **keys: Any) -> None:
    """Print how long CONFIG's visits take over 200 rounds: quantiles, the first n, who misses the deadline."""
    from hpcfl.config import load

    for table in contributed("speeds").shown(load(config, **keys, tell=True, data_dir=data_dir), data_dir):
        print_table(table)


@cli.command("list")
@click.argument("name", default="")
@_flag("--markdown", "as_page", "The page of all keys, or of columns, as in docs/reference.")
def list_(name: str, as_page: bool) -> None:
    """Print what there is to run; with NAME more of that.

    NAME is methods, models, data, speeds, presets, overlays, keys or columns; a preset or overlay; a section, a class
    of one or a key: algorithm, algorithm.salf, algorithm.salf.lr, rounds.
    """
    from hpcfl.commands import list as catalogue

    lines = catalogue.markdown(name) if as_page else catalogue.lines(name)
    _echo(catalogue.wrapped(lines, get_terminal_size().columns) if sys.stdout.isatty() else lines)


@cli.command()
@click.option("--out", type=PATH, default=Path("runs/demo"), show_default=True, help="Folder of the runs.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=3, show_default=True, help="MPI ranks of each run, if MPI is there."
)
@SETTINGS
@click.pass_context
def demo(context: click.Context, out: Path, ranks: int, settings: tuple[str, ...]) -> None:
    """Run three methods on bundled digits, print a table and draw a picture: a first look, of about a minute.

    Alone where there is no MPI that works. Given again, it goes on where it was.
    """
    _check_alone("demo", "but starts its ranks itself: expected it without mpirun")
    from hpcfl.commands import demo as demos

    if code := demos.demo(out, ranks, settings):
        sys.exit(code)
    folders = tuple(out / name for name in demos.PRESETS)
    context.invoke(show, folders=folders)
    context.invoke(plot, folders=folders, output=out / "accuracy.png")
    _echo(demos.NEXT)


def _check_alone(command: str, text: str) -> None:
    from hpcfl.mpi.launcher import world

    if world() is not None:
        raise UsageError(f"hpcfl {command} was started by an MPI launcher, {text}")


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Carry out a command in this process and return its exit code; signals do afterwards what they did before."""
    try:
        with terminal.installed():
            return carry_out(arguments)
    finally:
        stopping.uninstall()


def carry_out(arguments: list[str] | None = None) -> int:
    """Carry out a command; return its exit code. Errors of usage are one line on stderr, from one rank."""
    try:
        try:
            with blaming():
                cli.main(arguments, prog_name="hpcfl", standalone_mode=False)
        except click.ClickException as error:
            where = f"{error.ctx.command_path}: " if isinstance(error, click.UsageError) and error.ctx else ""
            raise UsageError(where + " ".join(error.format_message().split())) from error
        except ModuleNotFoundError as error:
            if "--debug" in (arguments or sys.argv):
                raise
            from hpcfl.mpi.launcher import refuse

            refuse(f"{error}: expected the packages that hpcfl is installed with, on each host")
    except UserError as error:
        if not error.settled:  # else NumPy may be missing, which that takes
            from hpcfl.launch.failure import speaks
        if error.settled or speaks(error):
            if "--debug" in (arguments or sys.argv):
                traceback.print_exc()
            say(str(error))
        return error.code
    except OSError as error:  # of a file, of which nobody has said more
        if not error.filename or "--debug" in (arguments or sys.argv):
            raise
        say(f"'{error.filename}': {error.strerror}")
        return 1
    except SystemExit as end:
        return int(end.code or 0)
    except click.Abort:  # by INT, where it is not noted
        return 128 + signal.SIGINT
    except (ErrorOnOtherRank, Stopped) as error:
        return error.code
    return 0
