"""What methods and keys are called on figures: as papers call them, by the config that a run has recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from hpcfl.algorithms import TITLES
from hpcfl.config.presets import PICKED
from hpcfl.results.run_table import Group, Recorded

METHOD, CLOSE = "algorithm.name", "participation.close"
ARRIVALS = {METHOD: "fedavg", CLOSE: "arrivals"}
DILOCO = {"server.optimizer": "nesterov", "algorithm.optimizer": "adamw"}
NAMED: tuple[tuple[str, dict[str, str]], ...] = (
    ("Malenia SGD", {**ARRIVALS, "participation.every_client": "true"}),
    ("Rennala SGD", {**ARRIVALS, "participation.max_staleness": "0"}),
    ("CA2FL", {**ARRIVALS, "weighting.correct": "remembered"}),
    ("Delayed Nesterov", {**ARRIVALS, "server.optimizer": "delayed-nesterov"}),
    ("Async DiLoCo", {**ARRIVALS, **DILOCO}),
    ("FedCompass", {**ARRIVALS, "participation.dispatch": "fedcompass"}),
    ("FedQueue", {**ARRIVALS, "participation.dispatch": "fedqueue"}),
    ("AsyncFL", {**ARRIVALS, "participation.buffer": "null"}),
    ("FedBuff", ARRIVALS),
    ("FedAsync", {**ARRIVALS, METHOD: "fedasync"}),
    ("Delay-adaptive SGD", {**ARRIVALS, METHOD: "ringmaster", "staleness.weight": "adaptive"}),
    ("Asynchronous SGD", {**ARRIVALS, METHOD: "ringmaster", "participation.max_staleness": "null"}),
    ("Ringmaster ASGD", {**ARRIVALS, METHOD: "ringmaster"}),
    ("DiLoCo", {METHOD: "fedavg", **DILOCO}),
    ("FedAvgM", {METHOD: "fedavg", "server.optimizer": "momentum"}),
    ("FedAdam", {METHOD: "fedavg", "server.optimizer": "adam"}),
    ("FedYogi", {METHOD: "fedavg", "server.optimizer": "yogi"}),
    ("FedAdagrad", {METHOD: "fedavg", "server.optimizer": "adagrad"}),
    ("FedAU", {METHOD: "fedavg", "weighting.correct": "estimated"}),
    ("MIFA", {METHOD: "fedavg", "weighting.correct": "remembered", "weighting.mean": "all"}),
    ("FedVARP", {METHOD: "fedavg", "weighting.correct": "remembered"}),
    ("FedAvg", {METHOD: "salf", "participation.partial": "discard"}),
)
"""What papers call a method beside certain keys, the first that fits; values as text, "null" where there is none."""
BESIDE = {
    "server.optimizer": {
        word: f"server {word.capitalize()}"
        for word in ("momentum", "nesterov", "delayed-nesterov", "adam", "yogi", "adagrad")
    },
    "weighting.correct": {
        "known": "inverse probabilities",
        "estimated": "estimated weights",
        "remembered": "remembered updates",
    },
}
"""What is said beside a method's name, where the name does not say it."""
WHOLE = ("fedavg", "feddyn", "fedprox", "fednova", "scaffold")
"""Methods that share the whole model: to be tested after fine-tuning is another method, -FT."""
TOLD = {
    *(key for _, keys in NAMED for key in keys),
    *("participation.partial", "participation.first", "participation.quorum", "doubling.when", "algorithm.evaluation"),
}
"""Keys that a method's name may tell, so that they are not said beside it."""
WAITS = "wait for all"
WORDS = {
    "algorithm.lr": "learning rate",
    "algorithm.batch": "batch size",
    "algorithm.epochs": "local epochs",
    "algorithm.steps": "local steps",
    "algorithm.weight_decay": "weight decay",
    "algorithm.mu": "μ",
    "server.lr": "server learning rate",
    "participation.deadline": "deadline (s)",
    "participation.grace": "grace (s)",
    "participation.max_seconds": "longest visit (s)",
    "participation.size": "clients per round",
    "participation.first": "visits waited for",
    "participation.concurrency": "clients at work",
    "participation.max_staleness": "largest staleness",
    "data.alpha": "Dirichlet α",
    "data.classes": "classes per client",
    "data.train_samples": "training samples",
    "model.hidden": "hidden units",
    "speed.rate": "rate (1/s)",
    "speed.kind": "speeds",
}
"""What keys are called, a unit in brackets; others by their last part."""


def method(keys: Mapping[str, str]) -> tuple[str, str]:
    """Return what papers call the method of a config, and what becomes of its stragglers; "" where the name says it."""
    name, doubles = keys.get(METHOD, "?"), keys.get("doubling.when", "never") != "never"

    def fits(wanted: Mapping[str, str]) -> bool:
        return all(keys.get(key, "null") == value for key, value in wanted.items())

    title, told = next((each for each in NAMED if fits(each[1])), (TITLES.get(name, name.rpartition(":")[2]), {}))
    if doubles:
        title = "FLANP" if name == "fedavg" else f"{title}-SRPFL"
    if name in WHOLE and keys.get("algorithm.evaluation") == "fine-tune":
        title += "-FT"
    for key, words in BESIDE.items():
        if key not in told and keys.get(key) in words:
            title += f" + {words[keys[key]]}"
    close, partial = keys.get(CLOSE, "all"), keys.get("participation.partial", "auto")
    if CLOSE in told or (doubles and close == "first"):
        return title, ""
    if keys.get("speed.model") == "trace" and keys.get("speed.closing") != "rule":
        return title, "replayed rounds"
    if close == "all":
        return title, WAITS
    if partial in ("layers", "steps"):
        return title, f"partial {partial}"
    if close == "deadline":  # of a class from outside it is not known whether layers count one by one
        whole = partial == "discard" or (name in TITLES and name != "salf")
        return title, "drop stragglers" if whole else "" if name in TITLES else "deadline"
    number = keys.get(f"participation.{close}")
    return title, {"first": f"fastest {number}", "quorum": f"quorum of {number}"}.get(close, "asynchronous")


def short(key: str) -> str:
    """Return what a key is called, with its unit in brackets."""
    return WORDS.get(key, key.rpartition(".")[2].replace("_", " "))


class Names:
    """What the runs of one figure are called.

    A method that some run waits for all with, and another does not, says so; else waiting is not spoken of.

    Parameters
    ----------
    labels : mapping
        Words for keys, for values as they are recorded, and for names as they would be.
    """

    def __init__(self, runs: Sequence[Recorded], labels: Mapping[str, str]) -> None:
        self.labels = labels
        found = {run.folder: method(run.keys) for run in runs}
        kinds = Counter(title for title, _ in set(found.values()))
        self.methods = {}
        for run in runs:
            title, how = found[run.folder]
            base = labels.get(title, title)
            if title == TITLES.get(run.keys.get(METHOD, "")):
                base = labels.get(run.keys[METHOD], base)
            name = f"{base} ({how})" if how and (how != WAITS or kinds[title] > 1) else base
            self.methods[run.folder] = labels.get(name, name)

    def value(self, run: Recorded, key: str) -> str:
        """Return what a run's value of a key is called: the method's name, or the key's name, value and unit."""
        if key == METHOD:
            return self.methods[run.folder]
        raw = run.keys.get(key, "–")
        if raw in self.labels or key in PICKS:
            return self.labels.get(raw, raw)
        name, _, unit = self.labels.get(key, short(key)).removesuffix(")").partition(" (")
        return f"no {name}" if raw == "null" else f"{name} {raw} {unit}".rstrip()

    def groups(self, groups: Sequence[Group], without: Collection[str] = ()) -> list[str]:
        """Return what tells groups of runs apart, but for keys that are shown otherwise: the method, then other keys.

        A run's folder is named where nothing else tells it from another.
        """
        several = METHOD not in without and len({self.methods[group.runs[0].folder] for group in groups}) > 1

        def label(group: Group, hidden: Collection[str]) -> str:
            run = group.runs[0]
            said = [self.methods[run.folder]] if several else []
            said += [self.value(run, key) for key in group.keys if key not in {*hidden, *without, METHOD}]
            return ", ".join(said) or self.methods[run.folder]

        places = [tuple(group.runs[0].keys.get(key) for key in without) for group in groups]
        names = [self.methods[group.runs[0].folder] for group in groups]
        for hidden, folders in ((TOLD, False), ((), False), ((), True)):  # each says more, where less is no name
            count = Counter(zip(names, places))
            for at, group in enumerate(groups):
                if count[names[at], places[at]] > 1:
                    names[at] = label(group, hidden) + f", {group.runs[0].name}" * folders
        return [self.labels.get(name, name) for name in names]


PICKS = {f"{section}.{pick.by}" for section, pick in PICKED.items()}


def in_order(values: Iterable[tuple[str, str]], order: Sequence[str]) -> list[str]:
    """Return what values are called, each once, of pairs of a value as recorded and what it is called, by `order`."""
    found = dict.fromkeys(values)
    at = {word: place for place, word in enumerate(order)}
    ranked = sorted(found, key=lambda pair: min(at.get(pair[0], len(at)), at.get(pair[1], len(at))))
    return list(dict.fromkeys(name for _, name in ranked))
