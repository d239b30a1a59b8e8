"""Experiment files and ``--set``: what they mean, and that every mistake is named with its place."""

import pytest

from hot.errors import HotError, PolicyError
from hot.policies.schema import load_policy
from hot.train import Experiment, experiment_names, load_experiment, run_experiment
from hot.train.data import Digits, Mnist
from hot.train.models import FromFile, ResNet18, Timm, Vit
from hot.train.optim import AdamW, Constant, Sgd

BASE = "model: {kind: vit, dim: 32}\ndata: {kind: mnist}\nepochs: 2\n"


def _problems(path, settings=()) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        load_experiment(str(path), settings)
    return list(caught.value.problems)


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_that_comes_with_hot_loads(name) -> None:
    assert load_experiment(name).name == name


def test_the_promised_experiments_are_there() -> None:
    assert {"quickstart", "fashion-vit", "fashion-resnet18", "wordnet-minilm"} <= set(experiment_names())


def test_a_file_means_what_it_says(write) -> None:
    experiment = load_experiment(str(write(BASE + "optimizer: {kind: sgd, lr: 1e-2}\nclip_norm: 1\n", "mine.yaml")))
    assert (experiment.name, experiment.model, experiment.data) == ("mine", Vit(dim=32), Mnist())
    assert (experiment.optimizer, experiment.clip_norm) == (Sgd(lr=0.01), 1.0)
    assert experiment.policies == ["hot"]


def test_short_forms(write) -> None:
    text = "model: timm:vit_tiny_patch16_224\ndata: digits\noptimizer: adamw\nschedule: constant\nsteps: 1\n"
    experiment = load_experiment(str(write(text)))
    assert experiment.model == Timm(name="vit_tiny_patch16_224")
    assert (experiment.data, experiment.optimizer, experiment.schedule) == (Digits(), AdamW(), Constant())


def test_all_problems_are_reported_at_once_with_their_places(write) -> None:
    path = write(
        "model: {kind: vit, dimm: 32}\n"
        "data: {kind: mnist, size: '32'}\n"
        "batch_sise: 4\n"
        "epochs: true\n"
        "schedule: {kind: cosin}\n"
        "precision: fp8\n"
    )
    problems = _problems(path)
    expected = [
        ("1:20 model.dimm", "unknown key 'dimm', did you mean 'dim'?"),
        ("2:27 data.size", "must be a whole number, not '32'"),
        ("3:1 batch_sise", "unknown key 'batch_sise', did you mean 'batch_size'?"),
        ("4:9 epochs", "must be a whole number, not true"),
        ("5:18 schedule.kind", "unknown schedule 'cosin', did you mean 'cosine'?"),
        ("6:12 precision", "must be 'float32' or 'bf16', not 'fp8'"),
    ]
    assert len(problems) == len(expected)
    for problem, (place, message) in zip(problems, expected, strict=True):
        assert f"{path}:{place}: " in problem and message in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: vit\ndata: mnist\n", "give either epochs or steps"),
        ("model: vit\ndata: mnist\nepochs: 1\nsteps: 1\n", "give either epochs or steps"),
        ("model: vit\nepochs: 1\n", "data is missing"),
        (BASE + "epochs: 3\n", "duplicate key 'epochs', first in line 3"),
        (BASE + "seeds: []\n", "seeds"),
        (BASE + "seeds: [1, 1]\n", "one seed is given twice"),
        (BASE + "batch_size: 0\n", "must be at least 1, not 0"),
        (BASE + "optimizer: {kind: adamw, lr: no}\n", "must be a number, not 'no'"),
        ("- 1\n", "must be a mapping"),
        ("", "the file is empty"),
        ("model: [vit\n", "not valid YAML"),
    ],
)
def test_mistakes_in_a_file(write, text, message) -> None:
    assert any(message in problem for problem in _problems(write(text)))


def test_unknown_experiment_suggests_the_nearest() -> None:
    with pytest.raises(HotError, match=r"no experiment 'quickstrat', did you mean 'quickstart'\?"):
        load_experiment("quickstrat")


def test_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(HotError, match=r"nothing\.yaml.*cannot be read: No such file"):
        load_experiment(str(tmp_path / "nothing.yaml"))


def test_settings_are_typed_as_yaml_and_reach_into_blocks(write) -> None:
    settings = ["optimizer.lr=1e-5", "model.depth=2", "compare=[exact, hot]", "clip_norm=null", "schedule.warmup=0.2"]
    experiment = load_experiment(str(write(BASE + "clip_norm: 1.0\nschedule: cosine\n")), settings)
    assert (experiment.optimizer.lr, experiment.model.depth, experiment.model.dim) == (1e-5, 2, 32)
    assert (experiment.compare, experiment.clip_norm, experiment.schedule.warmup) == (["exact", "hot"], None, 0.2)


def test_a_setting_of_another_kind_replaces_the_block(write) -> None:
    path = str(write(BASE))
    assert load_experiment(path, ["model.kind=resnet18", "model.width=8"]).model == ResNet18(width=8)
    assert load_experiment(path, ["model=resnet18"]).model == ResNet18()
    assert load_experiment(path, ["model.kind=vit"]).model == Vit(dim=32)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimiser.lr=1", "unknown key 'optimiser', did you mean 'optimizer'?"),
        ("optimizer.lrr=1", "unknown key 'lrr', did you mean 'lr'?"),
        ("epochs=1.5", "must be a whole number, not 1.5"),
        ("epochs=true", "must be a whole number, not true"),
        ("epochs", "must be key=value"),
        ("a..b=1", "must be key=value"),
        ("epochs.x=1", "epochs is 2, which has no 'x'"),
        ("seeds=[0,", "not valid YAML"),
    ],
)
def test_mistakes_in_settings(write, setting, message) -> None:
    text = BASE + "optimizer: {kind: adamw}\n"
    assert any(message in problem for problem in _problems(write(text), [setting]))


def test_paths_in_a_file_start_at_its_folder_and_those_in_settings_here(write, tmp_path) -> None:
    text = "data: digits\nsteps: 1\nmodel: net.py:build\ncompare: [exact, ./mine.yaml]\n"
    experiment = load_experiment(str(write(text)), allow_plugins=True)
    assert experiment.model == FromFile(path=str(tmp_path / "net.py"), function="build")
    assert experiment.compare == ["exact", str(tmp_path / "mine.yaml")]
    assert load_experiment(str(tmp_path / "tiny.yaml"), ["policy=a.yaml"], allow_plugins=True).policy == "a.yaml"


def test_code_runs_only_if_allowed(write, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hot.train import Model, register_model\n"
        "@register_model('test-config-mine')\n"
        "class Mine(Model):\n"
        "    width: int = 3\n"
    )
    path = str(write("model: {kind: test-config-mine, width: 4}\ndata: digits\nsteps: 1\nplugins: [mine.py]\n"))
    with pytest.raises(HotError, match="--allow-plugins"):
        load_experiment(path)
    assert load_experiment(path, allow_plugins=True).model.width == 4
    with pytest.raises(HotError, match=r"net\.py is code that would run; allow it with --allow-plugins"):
        load_experiment(str(write("model: net.py:build\ndata: digits\nsteps: 1\n", "file.yaml")))


def test_identity_is_what_decides_the_weights() -> None:
    first = Experiment(name="a", model=Vit(), data=Digits(), steps=3)
    assert first.identity() == first.model_copy(update={"name": "b", "threads": 2, "log_every": 7}).identity()
    assert first.identity() != first.model_copy(update={"batch_size": 7}).identity()


def test_a_backend_in_place_of_the_policies_own(tiny, tmp_path) -> None:
    run_experiment(load_experiment(str(tiny), ["steps=2", "backend=reference"]), tmp_path / "run")
    assert load_policy(tmp_path / "run/hot-seed0/policy.yaml").backend == "reference"
    with pytest.raises(PolicyError, match="did you mean 'reference'"):
        run_experiment(load_experiment(str(tiny), ["steps=2", "backend=refrence"]), tmp_path / "other")
    assert not (tmp_path / "other").exists()
