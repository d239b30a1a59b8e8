"""Broken policy files: each problem is cited where it was written (right behind the sign «), in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hot.errors import PolicyError
from hot.policies.schema import load_policy

BROKEN: dict[str, tuple[str, list[str]]] = {
    # unknown keys, at every level
    "unknown key": ("«defalts:\n  buffer: {kind: raw}\n", ["defalts: unknown key 'defalts', did you mean 'defaults'?"]),
    "unknown key, nothing near": ("«zzz: 1\n", ["zzz: unknown key 'zzz'; known: version, description, extends"]),
    "unknown path": (
        "defaults:\n  «grad_inputs: {}\n",
        ["defaults.grad_inputs: unknown key 'grad_inputs', did you mean 'grad_input'?"],
    ),
    "unknown operand": (
        "defaults: {grad_input: {«weights: {kind: none}}}\n",
        ["defaults.grad_input.weights: unknown key 'weights', did you mean 'weight'?"],
    ),
    "operand of the other path": (
        "defaults:\n  grad_input:\n    «input: {kind: none}\n",
        ["defaults.grad_input.input: unknown key 'input'; known: transform, grad_output, weight"],
    ),
    "unknown parameter": (
        "defaults:\n  grad_input:\n    weight: {kind: int, «bit: 4}\n",
        ["defaults.grad_input.weight.bit: unknown key 'bit', did you mean 'bits'?"],
    ),
    "parameter without its kind": (
        "defaults:\n  grad_input:\n    transform: {«block: 16}\n",
        ["transform.block: unknown key 'block'; transform 'none' takes no parameters; does the block lack its kind?"],
    ),
    "unknown key of a rule": (
        "rules:\n  - match: a\n    «polcy: exact\n",
        ["rules[0].polcy: unknown key 'polcy', did you mean 'policy'?"],
    ),
    "unknown key of a rule's block": (
        "extends: hot\nrules:\n  - match: a\n    grad_weight: {transform: {«rnk: 4}}\n",
        ["rules[0].grad_weight.transform.rnk: unknown key 'rnk', did you mean 'rank'?"],
    ),
    "unknown condition": (
        "rules:\n  - match: {type: Linear, «in_feature: 3}\n    policy: exact\n",
        ["rules[0].match.in_feature: unknown key 'in_feature', did you mean 'in_features'?"],
    ),
    "unknown key of a nested quantizer": (
        "defaults:\n  buffer:\n    kind: quantized\n    quantizer: {kind: int, «granulrity: row}\n",
        ["defaults.buffer.quantizer.granulrity: unknown key 'granulrity', did you mean 'granularity'?"],
    ),
    # kinds
    "unknown transform": (
        "defaults: {grad_input: {transform: {kind: «hadamrd}}}\n",
        ["defaults.grad_input.transform.kind: unknown transform 'hadamrd', did you mean 'hadamard'?"],
    ),
    "unknown quantizer": (
        "defaults: {grad_input: {weight: {kind: «itn, bits: 4}}}\n",
        ["defaults.grad_input.weight.kind: unknown quantizer 'itn', did you mean 'int'?"],
    ),
    "unknown buffer": (
        "defaults:\n  buffer: {kind: «pack}\n",
        ["defaults.buffer.kind: unknown buffer 'pack', did you mean 'packed'?"],
    ),
    "kind is no string": (
        "defaults:\n  buffer: {kind: «8}\n",
        ["defaults.buffer.kind: must be a string, not 8"],
    ),
    "nested kind is missing": (
        "defaults:\n  buffer: {kind: quantized, quantizer: «{bits: 4}}\n",
        ["defaults.buffer.quantizer: kind is missing; it is one of"],
    ),
    "nested unknown kind": (
        "defaults:\n  buffer: {kind: quantized, quantizer: {kind: «float9}}\n",
        ["defaults.buffer.quantizer.kind: unknown quantizer 'float9', did you mean 'float8'?"],
    ),
    # types
    "bool for an integer": (
        "defaults: {grad_input: {weight: {kind: int, bits: «true}}}\n",
        ["defaults.grad_input.weight.bits: must be a whole number, not true"],
    ),
    "string for an integer": (
        "defaults: {grad_input: {weight: {kind: int, bits: «'4'}}}\n",
        ["defaults.grad_input.weight.bits: must be a whole number, not '4'"],
    ),
    "underscores make a string": (
        "defaults: {grad_input: {transform: {kind: hadamard, seed: «4_8}}}\n",
        ["defaults.grad_input.transform.seed: must be a whole number, not '4_8'"],
    ),
    "float for an integer": (
        "defaults: {grad_input: {weight: {kind: int, bits: «4.5}}}\n",
        ["defaults.grad_input.weight.bits: must be a whole number, not 4.5"],
    ),
    "no is a string": (
        "rules:\n  - match: a\n    policy: exact\n    optional: «no\n",
        ["rules[0].optional: must be true or false, not 'no'"],
    ),
    "null for a block": (
        "defaults:\n  grad_input:«\n  buffer: {kind: raw}\n",
        ["defaults.grad_input: must be a mapping, not null"],
    ),
    "string for a block": (
        "defaults:\n  buffer: «packed\n",
        ["defaults.buffer: must be a mapping, not 'packed'"],
    ),
    "list for the defaults": ("defaults:\n  «- buffer\n", ["defaults: must be a mapping, not a list"]),
    "mapping for the rules": ("rules:\n  «match: a\n", ["rules: must be a list, not a mapping"]),
    "string for a rule": ("rules:\n  - «exact\n", ["rules[0]: must be a mapping, not 'exact'"]),
    "list for coefficients, too short": (
        "defaults: {grad_input: {weight: {kind: sawb, coefficients: «[1.0]}}}\n",
        ["defaults.grad_input.weight.coefficients: has too few items"],
    ),
    "list for coefficients, too long": (
        "defaults: {grad_input: {weight: {kind: sawb, coefficients: «[1, 2, 3]}}}\n",
        ["defaults.grad_input.weight.coefficients: has more than 2 items"],
    ),
    "null for a nested block": (
        "defaults: {buffer: {kind: quantized, quantizer: «null}}\n",
        ["defaults.buffer.quantizer: must be a mapping, not null"],
    ),
    "string in coefficients": (
        "defaults: {grad_input: {weight: {kind: sawb, coefficients: [1e-5, «1e-5x]}}}\n",
        ["defaults.grad_input.weight.coefficients[1]: must be a number, not '1e-5x'"],
    ),
    # ranges and choices
    "too many bits": (
        "defaults: {grad_input: {weight: {kind: int, bits: «16}}}\n",
        ["defaults.grad_input.weight.bits: must be at most 8, not 16"],
    ),
    "too few bits": (
        "defaults: {grad_input: {weight: {kind: int, bits: «1}}}\n",
        ["defaults.grad_input.weight.bits: must be at least 2, not 1"],
    ),
    "block is no power of two": (
        "defaults: {grad_input: {transform: {kind: hadamard, block: «12}}}\n",
        ["defaults.grad_input.transform.block: 12 is not a power of two"],
    ),
    "rank above block": (
        "defaults: {grad_weight: {transform: {kind: hadamard_low_rank, block: 16, rank: «20}}}\n",
        ["defaults.grad_weight.transform.rank: 20 is larger than block: 16"],
    ),
    "rank above a block that a rule shrinks": (
        "extends: hot\nrules:\n  - match: a\n    grad_weight: {transform: {block: «4}}\n",
        ["rules[0].grad_weight.transform.block: rank: 8 is larger than block: 4"],
    ),
    "lp_l1 has its own rank": (
        "extends: hot\ndefaults:\n  grad_weight:\n    transform: {rank: «8, order: lp_l1}\n",
        ["defaults.grad_weight.transform.rank: order lp_l1 keeps 10 of 16 coefficients, not 8"],
    ),
    "unknown rounding": (
        "defaults: {grad_input: {weight: {kind: int, rounding: «hash}}}\n",
        ["'hashed', 'pseudo_stochastic' or 'stochastic', not 'hash', did you mean 'hashed'?"],
    ),
    "unknown backend": ("backend: «refrence\n", ["backend: unknown backend 'refrence', did you mean 'reference'?"]),
    "backend is no string": ("backend: «1\n", ["backend: must be a string, not 1"]),
    # fields that belong elsewhere
    "tokens on grad_weight": (
        "defaults: {grad_weight: {transform: {kind: hadamard_low_rank, axis: «tokens}}}\n",
        ["defaults.grad_weight.transform.axis: 'tokens' is for grad_input"],
    ),
    "axis of a transform without one": (
        "defaults: {grad_input: {transform: {kind: hadamard, axis: «tokens}}}\n",
        ["defaults.grad_input.transform.axis: must be 'contracted', not 'tokens'"],
    ),
    "prefix over outputs": (
        "defaults: {grad_input: {transform: {kind: hadamard, prefix_tokens: «1}}}\n",
        ["defaults.grad_input.transform.prefix_tokens: is for transforms over tokens"],
    ),
    "tail over outputs": (
        "defaults: {grad_input: {transform: {kind: hadamard_low_rank, tail: «keep}}}\n",
        ["defaults.grad_input.transform.tail: is for transforms over tokens"],
    ),
    "token scale of a weight": (
        "defaults: {grad_input: {weight: {kind: int, granularity: «token}}}\n",
        ["defaults.grad_input.weight.granularity: a weight has no tokens; use granularity 'row' or 'block'"],
    ),
    # the document
    "bad version": ("version: «2\n", ["version: must be 1, the only version there is, not 2"]),
    "true is no version": ("version: «true\n", ["version: must be a whole number, not true"]),
    "an activation rule that says nothing": (
        "activations: [«{match: a}]\n",
        ["activations[0]: changes nothing; give it one of layer_norm, rms_norm, group_norm, batch_norm, gelu"],
    ),
    "an unknown op": ("activations: [{match: a, «gleu: {kind: raw}}]\n", ["unknown key 'gleu', did you mean 'gelu'?"]),
    "bits where values are needed": (
        "activations: [{match: a, gelu: {kind: «mask}}]\n",
        ["activations[0].gelu.kind: unknown activation buffer 'mask'"],
    ),
    "values where a bit is enough": (
        "activations: [{match: a, relu: {kind: «quantized}}]\n",
        ["activations[0].relu.kind: unknown mask buffer 'quantized'"],
    ),
    "a policy of an activation rule": (
        "activations: [{match: a, «policy: exact, relu: {kind: mask}}]\n",
        ["activations[0].policy: unknown key 'policy'"],
    ),
    "an activation rule without match": (
        "activations: [«{relu: {kind: mask}}]\n",
        ["activations[0]: match is missing: of which modules does the rule speak?"],
    ),
    "list of descriptions": ("description: «[a]\n", ["description: must be a string, not a list"]),
    "missing preset": (
        "extends: «hott\n",
        ["extends: no preset and no file 'hott', did you mean 'hot'?; presets: exact, hlq, hot"],
    ),
    "missing parent file": ("extends: «./none.yaml\n", ["extends: no preset and no file './none.yaml'"]),
    "extends itself": ("extends: «./broken.yaml\n", ["extends: extends itself: broken.yaml → broken.yaml"]),
    "two parents": ("extends: «[hot, luq]\n", ["extends: must be a string, not a list"]),
    "plug-in not allowed": ("plugins: [«./mine.py]\n", ["plugins[0]: plug-in './mine.py' is code and was not run;"]),
    # rules
    "rule without match": ("rules:\n  - «policy: exact\n", ["rules[0]: match is missing"]),
    "rule that changes nothing": (
        "rules:\n  - «match: a\n    optional: true\n",
        ["rules[0]: changes nothing; give it one of policy, grad_input, grad_weight, buffer"],
    ),
    "rule with an unknown policy": (
        "rules:\n  - match: a\n    policy: «exakt\n",
        ["rules[0].policy: no preset and no file 'exakt', did you mean 'exact'?"],
    ),
    "bad regular expression": (
        "rules:\n  - match: «'re:a(b'\n    policy: exact\n",
        ["rules[0].match: not a regular expression: missing ), unterminated subpattern"],
    ),
    "star inside a segment": (
        "rules:\n  - match: «blocks.1*\n    policy: exact\n",
        [r"for parts of a segment say 're:blocks\.1[^.]*'"],
    ),
    "question mark in a segment": ("rules:\n  - match: «a.b?\n    policy: exact\n", ["rules[0].match: 'b?': * stands"]),
    "empty segment": (
        "rules:\n  - match: «a..b\n    policy: exact\n",
        ["rules[0].match: 'a..b' has an empty segment"],
    ),
    "bad glob in a mapping": (
        "rules:\n  - match: {name: «a.*b}\n    policy: exact\n",
        ["rules[0].match.name: '*b': * stands for one whole segment"],
    ),
    "number for match": (
        "rules:\n  - match: «3\n    policy: exact\n",
        ["rules[0].match: must be a name pattern or a mapping such as {type: Conv2d}, not 3"],
    ),
    "empty match": (
        "rules:\n  - match: «{}\n    policy: exact\n",
        ["rules[0].match: is empty; give it one of type, name"],
    ),
    "bad comparison": (
        "rules:\n  - match: {groups: «'>>1'}\n    policy: exact\n",
        ["rules[0].match.groups: '>>1' is no comparison"],
    ),
    "bool for a number": (
        "rules:\n  - match: {groups: «true}\n    policy: exact\n",
        ["rules[0].match.groups: must be a whole number or a comparison such as '>1', not true"],
    ),
    "number for bias": (
        "rules:\n  - match: {bias: «1}\n    policy: exact\n",
        ["rules[0].match.bias: must be true or false, not 1"],
    ),
    "three kernel sizes": (
        "rules:\n  - match: {kernel_size: «[3, 3, 3]}\n    policy: exact\n",
        ["rules[0].match.kernel_size: must be a list of two whole numbers"],
    ),
    # YAML itself
    "duplicate key": (
        "defaults:\n  buffer: {kind: raw}\n  «buffer: {kind: packed}\n",
        ["defaults.buffer: duplicate key 'buffer', first in line 2"],
    ),
    "empty": ("«", ["the file is empty"]),
    "comments only": ("«# nothing\n", ["the file is empty"]),
    "list at the root": ("«- version: 1\n", ["must be a mapping, not a list"]),
    "string at the root": ("«hot\n", ["must be a mapping, not 'hot'"]),
    "syntax": ("defaults: {grad_input: {}\n«rules: []\n", ["not valid YAML: while parsing a flow mapping"]),
    "tab": (
        "defaults:\n«\tbuffer: {kind: raw}\n",
        ["not valid YAML: a tab cannot indent or begin a value; use spaces"],
    ),
    "control character": ("version: 1\ndescription: a«\x07\n", ["is not text: character #x07 is not allowed in YAML"]),
    "two documents": ("version: 1\n«---\nversion: 1\n", ["expected a single document"]),
    "undefined alias": ("defaults: «*base\n", ["found undefined alias 'base'"]),
    "tag": (
        "description: «!!python/object/apply:os.system [echo]\n",
        [
            "tags are refused: tag:yaml.org,2002:python/object/apply:os.system",
            "description: must be a string, not a list",
        ],
    ),
    "tag of the core": ("version: «!!int 1\n", ["tags are refused: tag:yaml.org,2002:int"]),
    "merge key": (
        "defaults:\n  grad_input: &a {weight: {kind: none}}\n  grad_weight:\n    «<<: *a\n",
        ["defaults.grad_weight: merge keys (<<) are refused"],
    ),
    "number as a key": ("«1: a\n", ["keys must be strings, not 1"]),
    "mapping as a key": ("? «{a: b}\n: c\n", ["keys must be strings, not lists or mappings"]),
    "recursive alias": ("defaults: «&a\n  grad_input: *a\n", ["not valid YAML: an alias stands inside its own value"]),
    "alias bomb": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
        ["not valid YAML: its aliases expand too far"],
    ),
    "too deep": ("a: " + "[" * 63 + "«[\n", ["not valid YAML: nested over 64 levels deep"]),
    "too many digits": ("version: «" + "9" * 5000 + "\n", ["not valid YAML: a number too long"]),
    "several at once": (
        "version: «3\nbackend: «nope\ndefaults:\n  grad_input:\n    weight: {kind: int, bits: «40, rounding: «down}\n"
        "  «bufer: {kind: raw}\nrules:\n  - match: «'re:('\n    «polcy: exact\n",
        [
            "version: must be 1",
            "backend: unknown backend 'nope'",
            "defaults.grad_input.weight.bits: must be at most 8, not 40",
            "defaults.grad_input.weight.rounding: must be",
            "defaults.bufer: unknown key 'bufer', did you mean 'buffer'?",
            "rules[0].match: not a regular expression",
            "rules[0].polcy: unknown key 'polcy', did you mean 'policy'?",
        ],
    ),
}


def unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its « signs, and the line and column that each stood before."""
    places = []
    while "«" in text:
        before, _, after = text.partition("«")
        places.append((before.count("\n") + 1, len(before) - before.rfind("\n")))
        text = before + after
    return text, places


LOOSE = ("tag", "alias bomb")  # two problems at one place; a place inside the expansion


@pytest.mark.parametrize("name", BROKEN)
def test_is_cited_where_it_was_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = BROKEN[name]
    text, places = unmarked(text)
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text(text)
    with pytest.raises(PolicyError) as caught:
        load_policy("broken.yaml")
    problems = caught.value.problems
    assert len(problems) == len(expected), caught.value
    for problem, (line, column), fragment in zip(problems, places, expected, strict=name not in LOOSE):
        assert problem.startswith(f"broken.yaml:{line}:{column}"), problem
        assert fragment in problem
