"""Places that carry a batch size, and the sizes that a command's words and files say by them."""

from __future__ import annotations

from pathlib import Path

from autotune.commands.script_probe import _script_batch_sizes
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.problem.job import Script, ScriptProfile
from autotune.script.argument_writer import with_argument_files
from autotune.script.carriers import STEP, Carrier, carrier_of, with_profile


def test_sizes_in_words_by_the_declared_flag() -> None:
    script = Script(("train.py", "--bs=8", "--lr", "1"), ".", ((MICRO_BATCH, "--bs"),))
    assert _script_batch_sizes(script, {"said": {ACCUMULATION: [3]}}) == {MICRO_BATCH: [8], ACCUMULATION: [3]}


def test_sizes_in_files_by_the_declared_name_or_by_usual_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {rows: 2}\nlr: 1\n")
    (tmp_path / "b.yaml").write_text("per_device_train_batch_size: 8\ngradient_accumulation_steps: 3\n")

    def sizes(words: str, flag: str) -> list[list[int]]:
        argv = tuple(words.split())
        script = with_argument_files(Script(argv, str(tmp_path), ((MICRO_BATCH, flag),)))
        found = _script_batch_sizes(script, {})
        return [found[MICRO_BATCH], found[ACCUMULATION]]

    assert sizes("train.py a.yaml b.yaml", "data.rows") == [[2, 2], [3]]
    assert sizes("train.py a.yaml b.yaml --bs 4", "--bs") == [[4], [3]], "a flag is no file's"


def test_findings_of_an_earlier_version_keep_the_flag_of_a_whole_step() -> None:
    stored = {"micro_batch": 4, "accumulation": 2, "found_flags": {ACCUMULATION: "--ga"}}
    profile = ScriptProfile.from_json({**stored, "product_flags": {"--global_batch_size": 32}})
    script = with_profile(Script(("train.py",), "."), profile)
    assert dict(script.flags) == {ACCUMULATION: "--ga"}, "as the earlier version stored them in its study"
    assert carrier_of(script, STEP) == Carrier("--global_batch_size", 4)
    assert carrier_of(script, ACCUMULATION) == Carrier("--ga")
