"""The columns of a run: what is recorded of each round."""

from __future__ import annotations

from hpcfl.base.errors import UsageError
from hpcfl.engine.job import Job
from hpcfl.schedule.plan import Fate
from hpcfl.store import Column

FATES = tuple(fate.name.lower() for fate in Fate)
COLUMNS = (
    Column("loss", (), "float64", "mean training loss over the visits that counted"),
    Column("accuracy", (), "float64", "accuracy of the shared model on the global test set"),
    Column("test_loss", (), "float64", "loss of the shared model on the global test set"),
    Column("objective", (), "float64", "mean loss over all training samples, the server's included, penalty included"),
    Column("client_accuracy", ("client",), "float64", "accuracy of the client's model on its own test part"),
    Column("client_test_loss", ("client",), "float64", "loss of the client's model on its own test part"),
    Column("mean_client_accuracy", (), "float64", "mean of client_accuracy over the clients of which it is known"),
    Column("mean_client_test_loss", (), "float64", "mean of client_test_loss over the clients of which it is known"),
    Column("cohort", ("client",), "bool", "client was invited, or at work where arrivals end rounds"),
    Column("arrived", ("client",), "bool", "something of the client's visit counted"),
    Column("rejected", ("client",), "bool", "the visit, or layers of it, did not count: not finite or too large"),
    Column("fate", ("client",), "int8", "what became of the client's visit, -1 if it was at none", "", FATES),
    Column("version", ("client",), "int64", "round whose state the client was served, -1 if not invited"),
    Column("depth", ("client",), "int64", "first layer that counted, L + 1 for none, -1 if not invited"),
    Column("blocks", ("client",), "int64", "layers of the client that counted"),
    Column("visit_seconds", ("client",), "float64", "simulated seconds a whole visit takes, inf if it never ends", "s"),
    Column("layer_weight", ("layer",), "float64", "sum of weights over the clients that reached the layer"),
    Column("stage", (), "int64", "stage of doubling participant sets"),
    Column("void", (), "bool", "no visit counted"),
    Column("repeats", (), "int64", "void attempts before this round, participation.min_clients not being met"),
    Column("deadline", (), "float64", "seconds until the round closed at the latest", "s"),
    Column("round_seconds", (), "float64", "simulated seconds of this round", "s"),
    Column("sim_seconds", (), "float64", "simulated seconds since the start", "s"),
    Column("wall_seconds", (), "float64", "wall-clock seconds since the start", "s"),
    Column("server_seconds", (), "float64", "wall-clock seconds of the server's step", "s"),
    Column("checkpoint_wait_seconds", (), "float64", "seconds waited for checkpoints since the row before", "s"),
    Column("checkpoint_seconds", (), "float64", "seconds that a checkpoint took, visible since the row before", "s"),
    Column("checkpoint_bytes", (), "int64", "bytes of that checkpoint; 0 where there was none", "bytes"),
    Column("message_bytes", (), "int64", "bytes of the layers that counted, as the method sends them", "bytes"),
    Column("visits", ("rank",), "int64", "visits computed"),
    Column("compute_seconds", ("rank",), "float64", "wall-clock seconds of computing", "s"),
    Column("wait_seconds", ("rank",), "float64", "wall-clock seconds of sending and waiting", "s"),
    Column("wire_bytes_in", ("rank",), "int64", "bytes received by MPI calls, evaluation excluded", "bytes"),
    Column("wire_bytes_out", ("rank",), "int64", "bytes sent by MPI calls, evaluation excluded", "bytes"),
)
ARRIVALS = [
    Column("arrival_client", ("arrival",), "int64", "whose visit arrived, in this order; -1: none did"),
    Column("arrival_version", ("arrival",), "int64", "round whose state it began with"),
    Column("arrival_staleness", ("arrival",), "int64", "the server's steps since then"),
    Column("arrival_number", ("arrival",), "int64", "visits that the client had begun before with the same state"),
    Column("arrival_depth", ("arrival",), "int64", "first layer that counted"),
    Column("arrival_visit_seconds", ("arrival",), "float64", "seconds that the whole visit takes", "s"),
    Column("arrival_seconds", ("arrival",), "float64", "when it arrived, since the start of the run", "s"),
]
ARRIVAL_STEPS = Column("arrival_steps", ("arrival",), "int64", "local steps that counted")
ORACLE = (
    Column("gradients", (), "int64", "gradients of single samples, the most that a visit that counted has computed"),
    Column("server_gradients", (), "int64", "gradients of single samples that the server's step has computed"),
    Column("vectors", (), "float64", "numbers that clients sent and that counted, over those of one client's model"),
    Column("epochs_a", (), "int64", "epochs in which clients computed gradients and sent"),
    Column("epochs_b", (), "int64", "epochs in which the server computed; rounds in a row without clients are one"),
    Column("epochs_c", (), "int64", "epochs in which clients only sent"),
    Column("oracle", (), "float64", "federated oracle complexity of the round: gradients plus phi times vectors"),
    Column("running_time", (), "float64", "expected running time of the round's epochs as eq. 25 has it, in gradients"),
)
"""Columns of federated oracle complexity, where `oracle.record` asks for them."""
STEPS = Column("steps", ("client",), "int64", "local steps of the client that counted, -1 if not invited")
"""The column of visits that may be cut short at a step."""


def columns(job: Job) -> list[Column]:
    """All columns of a run; UsageError where a metric has the name of another one."""
    found = [*COLUMNS, *(ORACLE if job.config.oracle.record else ())]
    found += [STEPS] if job.config.participation.by_steps else []
    if job.config.rules.by_arrivals:
        found += ARRIVALS + ([ARRIVAL_STEPS] if job.config.participation.by_steps else [])
    found += [Column(name, (), "float64", text) for name, text in job.algorithm.metric_columns.items()]
    taken = {column.name for column in found}
    for name in job.task.metrics:
        if name == "accuracy":
            continue
        if taken & {name, f"client_{name}", f"mean_client_{name}"}:
            raise UsageError(f"task.metrics: '{name}' is what another column is called; expected a name of its own")
        found.append(Column(name, (), "float64", f"{name} of the shared model on the global test set"))
        text = f"{name} of the client's model on its own test part"
        found.append(Column(f"client_{name}", ("client",), "float64", text))
        text = f"mean of client_{name} over the clients of which it is known"
        found.append(Column(f"mean_client_{name}", (), "float64", text))
    return found
