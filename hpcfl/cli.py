"""The commands. Exit codes: 0 done, 1 failed, 2 bad usage or config, 85 stopped on request after a checkpoint."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import click

from hpcfl.base.errors import ErrorOnOtherRank, RunError, Stopped, UsageError, UserError
from hpcfl.engine import stopping

RUN = click.Path(path_type=Path)
DATA_DIR = click.option(
    "--data-dir", type=RUN, envvar="HPCFL_DATA", help="Folder of the data sets, one folder each (or HPCFL_DATA)."
)
SETTINGS = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the config.")
FORCE = click.option("--force", is_flag=True, help="Go on even if the run seems to be running on a host that is gone.")
QUIET = click.option("--quiet", is_flag=True, help="No progress.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks of errors in usage too.")
@click.version_option(package_name="hpcfl")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Federated learning as an ordinary MPI batch job."""
    context.obj = debug


@cli.command()
@click.argument("config")
@SETTINGS
@click.option("--out", type=RUN, help="Run folder (default: runs/<name of the config>).")
@DATA_DIR
@click.option("--resume", "again", is_flag=True, help="Go on if the folder already holds a run of this config.")
@QUIET
@FORCE
def run(
    config: str,
    settings: tuple[str, ...],
    out: Path | None,
    data_dir: Path | None,
    again: bool,
    quiet: bool,
    force: bool,
) -> None:
    """Run CONFIG, a TOML file or a preset's name; the same alone, under mpirun and under srun."""
    stopping.install()
    from hpcfl.comm.launcher import world
    from hpcfl.launch.request import run_request
    from hpcfl.launch.run import launch

    launch(lambda: run_request(config, settings, out, data_dir, again, quiet, force), world())


@cli.command()
@click.argument("folder", type=RUN)
@DATA_DIR
@QUIET
@FORCE
def resume(folder: Path, data_dir: Path | None, quiet: bool, force: bool) -> None:
    """Go on with a run after its newest checkpoint that can be read whole, on any number of ranks."""
    stopping.install()
    from hpcfl.comm.launcher import world
    from hpcfl.launch.request import resume_request
    from hpcfl.launch.run import launch

    launch(lambda: resume_request(folder, data_dir, quiet, force), world())


@cli.command()
@click.argument("configs", nargs=-1, required=True)
@click.option("--out", type=RUN, required=True, help="Folder of the run folders and their logs.")
@SETTINGS
@click.option("--grid", multiple=True, metavar="KEY=V1,V2,...", help="A run for each value of a key.")
@click.option("--seeds", metavar="SEEDS", help="A run for each seed: 1,2,3 or 1-3.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at a time.")
@click.option("--launcher", default="", metavar="COMMAND", help="What starts each run, as in 'mpirun -n 4'.")
@click.option(
    "--list", "listing", is_flag=True, help="Print index, state, folder and command of each run; nothing runs."
)
@click.option("--only", type=int, metavar="INDEX", help="Only this one of the list.")
@DATA_DIR
@FORCE
def sweep(
    configs: tuple[str, ...],
    out: Path,
    settings: tuple[str, ...],
    grid: tuple[str, ...],
    seeds: str | None,
    jobs: int,
    launcher: str,
    listing: bool,
    only: int | None,
    data_dir: Path | None,
    force: bool,
) -> None:
    """Run every CONFIG with every value of --grid and --seeds: finished runs are skipped, others gone on with."""
    from hpcfl.commands import sweep as sweeps
    from hpcfl.commands import sweep_run

    sweep_run.check_alone()
    before = sweep_run.launcher_words(launcher)
    runs = sweeps.picked(sweeps.runs(configs, out, settings, grid, seeds, data_dir, force), only)
    sweeps.judge(runs, data_dir)
    if not listing:
        sys.exit(sweep_run.carry_out(runs, jobs, before))
    for each in runs:
        click.echo(each.line(before))


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=RUN)
@click.option("--wait", is_flag=True, help="Return when they have stopped.")
def stop(folders: tuple[Path, ...], wait: bool) -> None:
    """Ask running runs to stop after the round they are in; `hpcfl resume` goes on with them."""
    running = [stopping.running(folder) for folder in folders]  # all are judged before one is asked
    for folder in running:
        stopping.request(folder)
    for folder in running if wait else ():
        state = stopping.outcome(folder)
        if state != "stopped":
            raise RunError(f"'{folder}' did not stop: expected it to be stopped, it is {state}")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(as_json: bool) -> None:
    """Print what a launch looks like from the inside, and the traps in it; alone, under mpirun and under srun."""
    from hpcfl.comm.launcher import world
    from hpcfl.commands import doctor as doctors

    facts = doctors.examine(world())
    if facts is not None:
        for line in [doctors.as_json(facts)] if as_json else doctors.report(facts):
            click.echo(line)


@cli.command()
@click.argument("config")
@SETTINGS
@DATA_DIR
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="State placement and memory for so many MPI ranks (default: 1, in wall clock one per client).",
)
def check(config: str, settings: tuple[str, ...], data_dir: Path | None, ranks: int | None) -> None:
    """Validate CONFIG and print what it would do; nothing runs."""
    from hpcfl.commands import check as checking
    from hpcfl.config import load

    loaded = load(config, settings)
    header = loaded.check(data_dir)
    if ranks is None:
        ranks = 1 + loaded.clients if loaded.clock == "wall" else 1
    for line in checking.report(loaded, header, data_dir, ranks):
        click.echo(line)


@cli.command()
@click.argument("config")
@SETTINGS
@DATA_DIR
def optimum(config: str, settings: tuple[str, ...], data_dir: Path | None) -> None:
    """Find the minimum of CONFIG's objective over all training samples, and print it as one JSON object."""
    from hpcfl.commands import optimum as optima
    from hpcfl.config import load

    click.echo(json.dumps(optima.of(load(config, settings), data_dir).facts()))


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=RUN)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run.")
def show(folders: tuple[Path, ...], as_json: bool) -> None:
    """Print what runs came to: rounds, accuracy, times, who arrived, digest of the state."""
    from hpcfl.commands.show import printed, remarks, summary, table

    rows = [summary(folder) for folder in folders]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    else:
        printed(table(rows))
        for line in remarks(rows):
            click.echo(line)


@cli.command()
@click.argument("folder", type=RUN)
@click.option("--client", "chosen", metavar="ID[,ID...]|all", help="Who adapts (default: all that never took part).")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over their training data (default: tune_epochs).")
@DATA_DIR
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--out", type=RUN, metavar="FILE.h5", help="Write the layers that learned, as HDF5.")
def adapt(
    folder: Path, chosen: str | None, epochs: int | None, data_dir: Path | None, as_json: bool, out: Path | None
) -> None:
    """Let clients that never took part in a run learn their personal layers on its shared ones, and test them."""
    from hpcfl.commands import adapt as adapting
    from hpcfl.commands import adapt_request as adapt_wish
    from hpcfl.commands.show import printed

    adapt_wish.check_alone()
    found = adapting.adapted(adapt_wish.judged(folder, chosen, epochs, data_dir, out))
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(adapting.headline(found))
        printed(adapting.table(found))


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=RUN)
@click.option("-o", "--output", type=RUN, default=Path("accuracy.png"), show_default=True, help="The picture.")
def plot(folders: tuple[Path, ...], output: Path) -> None:
    """Draw accuracy against rounds and simulated time."""
    from hpcfl.commands.plot import plot as draw

    draw(folders, output)
    click.echo(str(output))


@cli.command()
@click.argument("folders", nargs=-1, required=True, type=RUN)
@click.option("--force", is_flag=True, help="Even if the run seems to be running on another host.")
def seal(folders: tuple[Path, ...], force: bool) -> None:
    """Make run folders readable by any HDF5 or netCDF-4 program, also after a kill."""
    from hpcfl import store

    for folder in folders:
        store.seal(folder, force)


@cli.command("list")
def list_() -> None:
    """Print the presets, and every section of the config with its keys."""
    from hpcfl.commands.list import lines

    for line in lines():
        click.echo(line)


def usage(error: click.ClickException) -> UsageError:
    """Return click's error as ours: one line."""
    where = f"{error.ctx.command_path}: " if isinstance(error, click.UsageError) and error.ctx else ""
    return UsageError(where + " ".join(error.format_message().split()))


def main(arguments: list[str] | None = None) -> int:
    """Carry out a command in this process and return its exit code; signals do afterwards what they did before."""
    try:
        return carry_out(arguments)
    finally:
        stopping.uninstall()


def carry_out(arguments: list[str] | None = None) -> int:
    """Carry out a command; return its exit code. Errors of usage are one line on stderr, from one rank."""
    try:
        _run(arguments)
    except UserError as error:
        from hpcfl.launch.failure import speaks

        if speaks(error):
            if "--debug" in (arguments or sys.argv):
                traceback.print_exc()
            print(f"hpcfl: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
    except SystemExit as end:
        return int(end.code or 0)
    except (ErrorOnOtherRank, Stopped) as error:
        return error.code
    return 0


def _run(arguments: list[str] | None) -> None:
    try:
        cli.main(arguments, prog_name="hpcfl", standalone_mode=False)
    except click.ClickException as error:
        raise usage(error) from error
