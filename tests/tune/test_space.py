"""Bad spaces fail before anything runs and name the key; good ones hold typed values."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cimage_dist.errors import UserError
from cimage_dist.tune import Choice, Range, checked_config, dotlist, grid, random_point, value_of
from cimage_dist.tune.plan import suggest
from cimage_dist.tune.spec import Sweep, load_sweep

from .conftest import SPACE, MakeSweep

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("model.num_facors: [4, 8]", "model.num_facors.*Did you mean 'model.num_factors'"),
        ("model: [4]", "model is a section|section"),
        ("model.num_factors: [4, many]", "model.num_factors.*'many'"),
        ("model.num_factors: [4, 0]", "model.num_factors must be at least 1"),
        ("model.num_factors: {low: 1.5, high: 8}", "model.num_factors takes whole numbers"),
        ("model.num_factors: []", "model.num_factors has an empty list"),
        ("model.num_factors: [8, 8]", "model.num_factors lists a choice twice"),
        ("model.num_factors: 8", "model.num_factors must be a list of choices or a range"),
        (
            "model.dropout: {low: 0.8, high: 0.2}",
            "model.dropout has contradictory bounds: low 0.8 is not below high 0.2",
        ),
        ("model.dropout: {low: 0.2}", "model.dropout needs both bounds"),
        ("model.dropout: {low: 0.2, high: 1.5}", "model.dropout must lie in"),
        ("model.dropout: {low: 0.2, high: high}", "model.dropout.high must be a number"),
        ("model.dropout: {low: 0, high: 0.5, log: true}", "model.dropout has log: true"),
        (
            "model.dropout: {low: 0.1, high: 0.5, lgo: true}",
            "model.dropout has an unknown entry 'lgo'",
        ),
        ("cluster.growth: {low: 0, high: 1}", "cluster.growth is no number"),
        ("sampler.fanouts: {low: 1, high: 2}", "sampler.fanouts is no number"),
        ("optim.weight_decay: {around: 2}", "optim.weight_decay is 0.0 in the given config"),
        ("run.seed: [1, 2]", "run.seed cannot be searched"),
        ("data.split: [random, public]", "data.split cannot be searched"),
        ("optim.lr_min: {low: 0.5, high: 0.9}", "optim.lr_min must lie between 0 and optim.lr_max"),
        ("mask.symmetric: [true, perhaps]", "mask.symmetric.*perhaps"),
    ],
)
def test_bad_spaces_name_the_key(make_sweep: MakeSweep, entry: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_sweep(f"space:\n  {entry}\n")


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("space: {}", [], "it is empty"),
        ("trials: 3", [], "needs one file with a `space:` section"),
        ("space: {model.dropout: [0.1]}\nserach: grid", [], "Unknown sweep setting 'serach'"),
        ("space: {model.dropout: [0.1]}\nsearch: best", [], "sweep.search must be one of"),
        ("space: {model.dropout: [0.1]}", ["sweep.trials=0"], "sweep.trials must be above 0"),
        ("space: {model.dropout: [0.1]}", ["sweep.trials=few"], "sweep.trials must be of type int"),
        (
            "space: {model.dropout: {low: 0.1, high: 0.2}}\nsearch: grid",
            [],
            "model.dropout is a range",
        ),
        ("space: {model.dropout: [0.1]}\nfixed: {model.droput: 0.1}", [], "model.droput"),
        (
            "space: {model.num_factors: [4, 8]}\nscheduler: pbt\nsearch: random",
            [],
            "model.num_factors changes the model's shape",
        ),
        (
            "space: {loss.factor_weight: [0, 0.1]}\nscheduler: pbt\nsearch: random",
            [],
            "loss.factor_weight reaches 0",
        ),
        ("space:\n  model.dropout: [0.1]\n  model.dropout: [0.2]", [], "given twice"),
        ("space: {model.dropout: [", [], "cannot be read as yaml"),
    ],
)
def test_bad_sweep_files(make_sweep: MakeSweep, text: str, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_sweep(text, *overrides)


def test_values_are_those_of_the_config(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(
        "space:\n  loss.factor_weight: [1, 2e-1]\n  sampler.fanouts: [[10, 5], []]\n  "
        "ci.target: [null, 3]\n  optim.lr_max: {low: 1e-3, high: 1}\n"
    )
    weight, fanouts, target, rate = sweep.space
    assert (
        isinstance(weight, Choice)
        and weight.values == (1.0, 0.2)
        and type(weight.values[0]) is float
    )
    assert isinstance(fanouts, Choice) and fanouts.values == ([10, 5], [])
    assert isinstance(target, Choice) and target.values == (None, 3)
    assert rate == Range("optim.lr_max", 0.001, 1, False, False)
    point = {
        "sampler.fanouts": [10, 5],
        "ci.target": None,
        "optim.lr_max": 1e-05,
        "optim.lr_min": 0.0,
        "cluster.growth": "mean",
        "mask.symmetric": True,
    }
    cfg = sweep.config(point)
    assert dotlist({"ci.target": None}) == ["ci.target=null"]
    assert (
        cfg.sampler.fanouts,
        cfg.ci.target,
        cfg.optim.lr_max,
        cfg.cluster.growth,
        cfg.mask.symmetric,
    ) == ([10, 5], None, 1e-05, "mean", True)


def test_a_value_may_need_another_key_of_the_space(make_sweep: MakeSweep) -> None:
    """lr_max 0.0005 is below the given lr_min, but not below every lr_min that is searched."""
    sweep = make_sweep(
        "space:\n  optim.lr_max: {low: 5e-4, high: 1e-2}\n  optim.lr_min: {low: 1e-5, high: 1e-4}\n"
    )
    assert [d.key for d in sweep.space] == ["optim.lr_max", "optim.lr_min"]


def test_the_command_line_wins_over_the_sweep_file(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(
        "space: {model.dropout: [0.1]}\nfixed: {train.epochs: 7, train.batch_edges: 9}\n",
        "train.epochs=8",
        "sweep.trials=3",
    )
    assert (sweep.base.train.epochs, sweep.base.train.batch_edges, sweep.settings.trials) == (
        8,
        9,
        3,
    )


def test_around_the_given_value(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(
        "space:\n  optim.lr_max: {around: 4}\n  model.structure_hidden: {around: 2}\n"
    )
    assert sweep.space == (
        Range("optim.lr_max", 0.0025, 0.04, True),
        Range("model.structure_hidden", 16, 64, True, True),
    )


def test_budgets_do_not_make_another_sweep(make_sweep: MakeSweep) -> None:
    first = make_sweep()
    assert make_sweep(SPACE, "sweep.trials=50", "sweep.top=1").root == first.root
    assert make_sweep(SPACE, "sweep.seed=1").root != first.root
    assert make_sweep(SPACE, "train.epochs=21").root != first.root


def test_random_points_cover_the_space(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(
        "space:\n  model.num_layers: {low: 2, high: 5}\n  optim.weight_decay: {low: 1e-6, high: "
        "1e-2, log: true}\n  ci.partition: [ci, random]\n"
    )
    points = [random_point(sweep.space, 0, i) for i in range(400)]
    layers = [p["model.num_layers"] for p in points]
    assert {layers.count(n) > 70 for n in range(2, 6)} == {True} and set(layers) == {2, 3, 4, 5}
    below = sum(p["optim.weight_decay"] < 1e-4 for p in points)
    assert 160 < below < 240, "half of the logarithm lies below the geometric mean"
    assert points[7] == random_point(sweep.space, 0, 7) and points[7] != random_point(
        sweep.space, 1, 7
    )


def test_grid_visits_every_combination_once(make_sweep: MakeSweep) -> None:
    sweep = make_sweep(
        "search: grid\nspace:\n  model.num_factors: [4, 8]\n  ci.partition: [ci, random]\n"
    )
    assert [tuple(p.values()) for p in grid(sweep.space)] == [
        (4, "ci"),
        (4, "random"),
        (8, "ci"),
        (8, "random"),
    ]
    assert suggest("random", sweep.space, 0, 9, []) in grid(sweep.space)


def commands_of(path: Path) -> list[list[str]]:
    """The words behind `cimage sweep` of every command in a file's header."""
    lines = (line.lstrip("# ") for line in path.read_text().splitlines())
    return [line.split()[2:] for line in lines if line.startswith("cimage sweep ")]


def load(words: list[str]) -> Sweep:
    paths = [str(ROOT / word) for word in words if "=" not in word]
    return load_sweep(paths, [word for word in words if "=" in word])


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.name)
def test_shipped_spaces_have_no_dead_point(path: Path) -> None:
    """Fifty points of the space on every config its header names; every value names its source."""
    commands = commands_of(path)
    assert commands and all(words[0].endswith(path.name) for words in commands)
    for words in commands:
        sweep = load(words)
        assert sweep.base.train.validate_every > 0
        points = [random_point(sweep.space, 1, number) for number in range(50)]
        loaded = [checked_config(sweep.base, point) for point in points]
        assert loaded[0] == sweep.config(points[0]), "as the files and overrides give it"
    if path.name != "demo.yaml":
        lines = path.read_text().split("space:")[1].splitlines()
        # beside the value, or above it where the line is long
        sourced = [
            "# [" in line or "# [" in above
            for above, line in itertools.pairwise(lines)
            if line.strip()
            and not line.rstrip().endswith(":")
            and not line.lstrip().startswith("#")
        ]
        assert all(sourced), "a value without its source"


@pytest.mark.parametrize("task", ["node", "link"])
def test_the_papers_spaces_contain_the_appendix(task: str) -> None:
    """The values of every dataset of the appendix lie inside the space, which loads around each."""
    for config in sorted((ROOT / "configs" / "paper" / task).glob("*.yaml")):
        sweep = load([f"configs/sweeps/paper_{task}.yaml", str(config.relative_to(ROOT))])
        given = {d.key: d.position(value_of(sweep.base, d.key)) for d in sweep.space}
        assert all(at is not None for at in given.values()), (config.name, given)


def test_keys_that_do_not_fit_together_are_refused(make_sweep: MakeSweep) -> None:
    with pytest.raises(UserError, match=r"the point .*ci.target=8.* is no valid config: ci.target"):
        make_sweep("space:\n  model.num_factors: [4, 8, 16]\n  ci.target: [2, 8]\n")
    with pytest.raises(UserError, match=r"ci.target=8"):
        make_sweep("search: grid\nspace:\n  model.num_factors: [8, 16]\n  ci.target: [2, 8]\n")
    fanouts = "space:\n  sampler.fanouts: [[5, 5], [5, 5, 5]]\n  model.num_layers: [2, 3]\n"
    with pytest.raises(UserError, match=r"sampler.fanouts has . hops, but model.num_layers"):
        make_sweep(fanouts)


def test_a_population_counts_passes(make_sweep: MakeSweep) -> None:
    space = "search: random\nscheduler: pbt\nspace:\n  optim.lr_max: {low: 0.001, high: 0.01}\n"
    for more in (["train.steps=50"], ["sampler.fanouts=[5,5]", "train.epochs=null"]):
        with pytest.raises(UserError, match=r"scheduler pbt .* Set train\.epochs"):
            make_sweep(space, *more)
    assert make_sweep(space, "sampler.fanouts=[5,5]", "train.epochs=4").base.epochs == 4


def test_a_rare_point_that_does_not_fit_is_not_tried(make_sweep: MakeSweep) -> None:
    sweep = make_sweep()
    good = suggest("random", sweep.space, 0, 3, [])
    other = suggest("random", sweep.space, 0, 3, [], is_valid=lambda point: point != good)
    assert good is not None and other is not None and other != good


@pytest.mark.parametrize("epochs", [9, 90, 900])
def test_the_grace_period_follows_the_length_of_a_run(make_sweep: MakeSweep, epochs: int) -> None:
    from cimage_dist.distributed.tune import make_rule

    sweep = make_sweep(SPACE, "sweep.scheduler=asha", f"train.epochs={epochs}")
    rungs = make_rule(sweep)._brackets[0]._rungs
    assert min(milestone for milestone, _ in rungs) == epochs / 9
