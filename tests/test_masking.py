"""Secrets are in no byte that leaves the tuner: by their names, wherever they stand."""

import dataclasses
import json
import os
import random
import shlex
import sqlite3
import string
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.masking import (
    MASK,
    forget,
    learn,
    learn_words,
    masked,
    masked_data,
    masked_values,
    masked_words,
    names_secret,
    shell_text,
)
from autotune.problem.candidate import KNOBS
from autotune.problem.hardware import detect
from autotune.problem.job import ArgumentFile, Script, ScriptProfile
from autotune.problem.outcome import OutcomeKind
from autotune.problem.space import DS_SECTIONS, DS_TOP_LEVEL, DS_ZERO_KEYS
from autotune.script.profile import unknown_job
from autotune.util.files import write_atomically
from tests.cli_call import call
from tests.conftest import make_job
from tests.studies import study_of_every_kind

QUIET = settings(
    max_examples=max(1, settings.default.max_examples // 50),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def nothing_learnt() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.parametrize(
    "name",
    [
        *("--wandb_key", "--aws_secret_access_key", "--auth", "--api-key", "apiKey", "HF_TOKEN", "hub_token", "token"),
        *("secret", "passwd", "db.password", "--sshkey", "x_credential", "MYSQL_PWD", "oauth", "authToken", "api_keys"),
        *(
            "private_key_pem",
            "key",
            "passWord",
            "client_secret",
            "Authorization",
            "credentials",
            "WANDB_API_KEY",
            "Pwd",
        ),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--tokenizer", "--max_tokens", "--num_key_value_heads", "--keys", "key_value_heads", "--author", "authors"),
        *("pad_token", "eos_token_id", "tokens_per_second", "KEYBOARD", "monkey", "PWD", "OLDPWD", "XAUTHORITY"),
        *("key_padding_mask", "prompt_key", "input_key", "tokenizer_name", "turkey", "keyword", "token_type_ids"),
        *KNOBS,
        *sorted(DS_ZERO_KEYS),
        *sorted(DS_TOP_LEVEL),
    ],
)
def test_other_names(name: str) -> None:
    assert not names_secret(name)


def test_of_deepspeeds_keys_only_those_of_services_name_secrets() -> None:
    assert {key for keys in DS_SECTIONS.values() for key in keys if names_secret(key)} <= {"api_key"}


# Made up in the formats that services document.
TOKENS = (
    *("npm_a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8", "pypi-AgEIcHlwaS5vcmcC1d2E3f4", "AKIAIOSFODNN7EXAMPLE"),
    *("xoxb-123456789012-Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8", "nvapi-a1B2c3D4e5F6g7H8i9J0-k1L2m3N4", "hf_abcdefghijklmnopQRSTUV"),
    *("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.a1-B2_c3", "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q"),
)
NO_TOKENS = (
    *("Qwen3MoeForSequenceClassification", "model_Qwen3MoeForCausalLM", "TinyLlama-1.1B-intermediate-step-1431k-3T"),
    *("8f6cd22b1a4f5f0c4f4b1f7e3f0a9d8c7b6a5948", "run-20261127T034500Z", "meta-llama/Llama-3.2-11B-Vision-Instruct"),
    *("out/exp_lr3e4_bs64_warmup2000_seed42", "GPU-76ab1085-0000-0000-0000-bcfcb8b136c0"),
    *("sk_buff_allocation_failure", "exp_LoRA16Alpha32Dropout05Llama3", "sk-learn-linear-regression-model"),
    *("hf_model_checkpoint_path_v2", "run_Qwen3MoE30BA3BInstruct2507FP8", "sft_SmolLM2135MUltraChat200kSeed11"),
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run --wandb_key=abc --x 1", "run --wandb_key=*** --x 1"),
        ("--token abc --max_tokens 5", "--token *** --max_tokens 5"),
        ("WANDB_KEY='a b' python t.py", "WANDB_KEY=*** python t.py"),
        ("https://u:pw@h/x", "https://u:***@h/x"),
        ('{"api_key": "a\\"b", "password": ""}', '{"api_key": "***", "password": ""}'),
        ("a: 1\n  hub_token: abc", 'a: 1\n  hub_token: "***"'),
        ("error: argument --token: expected one", "error: argument --token: expected one"),
        ("+trainer.wandb.api_key=xyz", "+trainer.wandb.api_key=***"),
        ("KEY=VALUE: an option", "KEY=VALUE: an option"),
        ("--use_auth_token true --bf16", "--use_auth_token true --bf16"),
        ("postgresql://USER:PASSWORD@HOST/DB", "postgresql://USER:PASSWORD@HOST/DB"),
        ("Bearer abcdefghijk", "Bearer ***"),
        ("srun -p gpu train.py -p 0.9 -p 8080 -p bf16", "srun -p gpu train.py -p 0.9 -p 8080 -p bf16"),
        ("srun -p gpu-a100 train.py -p standard", "srun -p gpu-a100 train.py -p standard"),
        ("-p bf16-mixed -p 8080:80 -p a=b1c2d3", "-p bf16-mixed -p 8080:80 -p a=b1c2d3"),
        ("-p out/model.safetensors -p --bf16", "-p out/model.safetensors -p --bf16"),
        ("unknown key: foo", "unknown key: foo"),
        ("Server=x;Uid=me;Pwd=abc1;", "Server=x;Uid=me;Pwd=***"),
        ("https://s3/x?X-Amz-Signature=ab1&b=2", "https://s3/x?X-Amz-Signature=***&b=2"),
        ("https://h/c?sv=1&sig=ab1%3D", "https://h/c?sv=1&sig=***"),
        *((f"--x {text} y", "--x *** y") for text in TOKENS),
        *((f"--x {text} y", f"--x {text} y") for text in NO_TOKENS),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize(
    ("start", "signs", "length"),
    [
        ("hf_", string.ascii_letters, 34),
        ("ghp_", string.ascii_letters + string.digits, 36),
        ("sk-", string.ascii_letters + string.digits + "_-", 48),
        ("glpat-", string.ascii_letters + string.digits + "_-", 20),
        ("sk-", string.hexdigits[:16], 32),
        ("sk-", string.ascii_letters + string.digits, 16),
    ],
)
def test_random_tokens_of_every_alphabet_are_masked(start: str, signs: str, length: int) -> None:
    draw = random.Random(0)
    tokens = [start + "".join(draw.choices(signs, k=length)) for _ in range(1000)]
    shown = [token for token in tokens if MASK not in masked(token)]
    assert len(shown) <= 0.002 * len(tokens), shown


def test_words_follow_their_flags() -> None:
    words = ["train.py", "--key", "abc", "--lr", "1", "db_password=x", "--auth=y", "--flag_token", "--bf16"]
    assert masked_words(words) == ["train.py", "--key", MASK, "--lr", "1", "db_password=***", "--auth=***", *words[-2:]]


@pytest.mark.parametrize("flag", [["--header"], []])
@pytest.mark.parametrize("word", ["X-Api-Key: v4lue-1", "X-Api-Key:v4lue-1", "Authorization: v4lue-1"])
def test_a_header_is_masked_as_a_word_and_in_every_later_text(flag: list[str], word: str) -> None:
    words = ["train.py", *flag, word] if flag else ["train.py", f"--header={word}"]
    assert masked_words(words)[-1].endswith(MASK)
    assert "v4lue" not in " ".join(masked_words(words))
    learn_words(words)
    assert "v4lue" not in masked(f"sent {' '.join(words)} to the host")
    asked: dict[str, tuple[str, str]] = {}
    assert "v4lue" not in shell_text(words, asked)
    assert [secret for _, secret in asked.values()] == ["v4lue-1"]


def test_the_words_of_a_scripts_model_are_masked_before_they_are_joined() -> None:
    script = Script(("train.py", "--header", "X-Api-Key: short"), "/")
    assert unknown_job(script, detect("cpu", 1)).model.source == f"train.py --header X-Api-Key: {MASK}"


def test_data_keep_their_shape() -> None:
    data = {
        "key": "abc",
        "n": {"token": 5, "xs": ["--auth", "q"]},
        "environment": [["A_KEY", "v"]],
        "password": 12345678,
    }
    shown = {"key": MASK, "n": {"token": 5, "xs": ["--auth", MASK]}, "environment": [["A_KEY", MASK]], "password": MASK}
    assert masked_data(data) == shown


def test_a_known_value_is_masked_wherever_it_stands() -> None:
    learn('s3cr<t"v&')
    assert masked_values(f'x s3cr<t"v& y {json.dumps("s3cr<t" + chr(34) + "v&")}') == f'x {MASK} y "{MASK}"'
    assert "s3cr" not in masked("<p>s3cr&lt;t&quot;v&amp;</p>")
    learn("training")
    assert masked("training, your_training_must") == f"{MASK}, your_{MASK}_must"


def test_errors_hold_no_secrets() -> None:
    learn("pa55-phrase")
    assert "pa55" not in str(UserError("cannot log in with pa55-phrase"))
    assert "zzz" not in str(UserError("bad --api_key=zzz"))


def test_a_batch_script_asks_for_variables() -> None:
    asked: dict[str, tuple[str, str]] = {}
    text = shell_text(["train.py", "--key", "abc", "--auth=y z", "--db", "pg://u:p@h"], asked)
    assert text == 'train.py --key "${KEY}" --auth="${AUTH}" --db "${SECRET_2}"'
    assert [secret for _, secret in asked.values()] == ["abc", "y z", "pg://u:p@h"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_respect_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new", "x")
        write_atomically(tmp_path / "state", "x", private=True)
        (tmp_path / "old").touch(0o640)
        (tmp_path / "old").chmod(0o604)
        write_atomically(tmp_path / "old", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == mode
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "old").stat().st_mode & 0o777 == 0o604


# -- a whole study -----------------------------------------------------------------------------------------------------------

SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789-_./+=!@#%&<>\"'$ ", min_size=9, max_size=24).filter(
    lambda text: text.strip() == text and text[0].isalnum() and any(sign.isdigit() for sign in text)
)
PROFILE = {
    "config": {},
    "causal": True,
    "model": "LlamaForCausalLM",
    "checkpointing": True,
    "through_arguments": True,
    "micro_batch": 2,
    "client_optimizer": True,
    "accumulation": 1,
    "seq_len": 32,
}


@QUIET
@given(secrets=st.lists(SECRET, min_size=7, max_size=7, unique=True))
def test_no_file_and_no_line_of_a_study_holds_a_secret(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    secrets: list[str],
) -> None:
    forget()
    folder = tmp_path_factory.mktemp("secrets")
    monkeypatch.chdir(folder)
    first, second, third, fourth, fifth, sixth, seventh = (f"Q{text}7" for text in secrets)
    data = {"hub_token": fourth, "run": [{"service": {"api_key": fifth}}]}
    script = Script(
        (
            "train.py",
            f"--wandb_key={first}",
            "--auth",
            second,
            "args.json",
            f"--db=pg://joe:{'pw' + str(abs(hash(sixth)))}@h/x",
            "--header",
            "X-Api-Key: 4-short",
        ),
        str(folder),
        environment=(("WANDB_API_KEY", third),),
        files=(ArgumentFile(4, str(folder / "args.json"), json.dumps(data), data),),
        profile=ScriptProfile.from_json(PROFILE),
    )
    job = make_job(script=script, base_config={"comet": {"enabled": True, "api_key": seventh}})
    monkeypatch.setattr("tests.studies.make_job", lambda: job)
    store = study_of_every_kind(folder / "runs", (OutcomeKind.OK, OutcomeKind.CRASH, OutcomeKind.OOM_DEVICE))
    monkeypatch.setattr("sys.argv", ["autotune", "run", "--", "WANDB_API_KEY=" + third, *script.argv])
    from autotune.cli.options import typed_command

    store.note_command(typed_command())
    said = ""
    for words in (
        ("show", "s"),
        ("show", "s", "--json"),
        ("report", "s"),
        *(("export", "s", "--format", style) for style in ("deepspeed", "accelerate", "hf", "sbatch")),
    ):
        code, out, err = call(monkeypatch, capsys, *words)
        assert code in (0, 2), err
        said += out + err
        if "--json" in words:
            json.loads(out)
    for secret in (first, second, third, fourth, fifth, f"pw{abs(hash(sixth))}", seventh, "4-short"):
        forms = {secret, json.dumps(secret)[1:-1], shlex.quote(secret)}
        assert not any(form in said for form in forms), secret
        for path in (folder / "runs").rglob("*"):
            if path.is_file() and path.name != "study.db":
                text = path.read_bytes().decode(errors="replace")
                assert not any(form in text for form in forms), (secret, path.name)
    with closing(sqlite3.connect(folder / "runs" / "s" / "study.db")) as database:
        rows = database.execute("select key, value_json from study_user_attributes").fetchall()
    told = " ".join(value for key, value in rows if not key.startswith("fingerprint"))
    assert not any(json.dumps(secret)[1:-1] in told for secret in (first, second, third))
    kept = dataclasses.asdict(store.job)["script"]
    assert kept["argv"] == script.argv, "a study goes on with the command as it was typed"


def test_the_hubs_test_models_are_no_tokens() -> None:
    assert masked("hf-internal-testing/tiny-random-gpt2") == "hf-internal-testing/tiny-random-gpt2"
