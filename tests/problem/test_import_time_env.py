"""Variables that a script's code sets and that count only early: read in its text, or seen to come too late."""

import pytest

from autotune.problem.import_time_env import of_the_device, set_late, settings_in, too_late, variables_after


def left(text: str, **known: str) -> dict[str, str]:
    return variables_after(settings_in(text), known)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("os.environ['HF_HOME'] = '/a'", {"HF_HOME": "/a"}),
        ("environ['NCCL_P2P_DISABLE'] = '1'", {"NCCL_P2P_DISABLE": "1"}),
        ("os.environ.setdefault('HF_ENDPOINT', 'https://a')", {"HF_ENDPOINT": "https://a"}),
        (
            "os.environ.update({'CUDA_VISIBLE_DEVICES': '0', 'HF_HUB_OFFLINE': f(), **more}, HF_HOME='/a', **more)",
            {"CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/a"},
        ),
        ("os.environ |= {'DS_SKIP_CUDA_CHECK': '1'}", {"DS_SKIP_CUDA_CHECK": "1"}),
        ("os.putenv('PYTORCH_CUDA_ALLOC_CONF', 'a:1')", {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
        ("if __name__ == '__main__':\n    os.environ['NCCL_ALGO'] = 'Ring'\n    main()", {"NCCL_ALGO": "Ring"}),
        ("os.environ['HF_HOME'] = '/a'\nos.environ['HF_HOME'] = '/b'", {"HF_HOME": "/b"}),
        # no literals, and not surely done
        ("os.environ['HF_HOME'] = home", {}),
        ("os.environ['HF_HOME'] += '/a'", {}),
        ("def f():\n    os.environ['HF_HOME'] = '/a'", {}),
        ("settings['HF_HOME'] = '/a'\nsettings.update(HF_HOME='/a')\nsettings.setdefault('HF_HOME', '/a')", {}),
        ("os.environ['HF_HOME'] = 1", {}),
        # others are read at every use, or are a rank's own
        ("os.environ['HF_TOKEN'] = 'secret'\nos.environ['WANDB_PROJECT'] = 'a'\nos.environ['PATH'] = '/a'", {}),
        ("os.environ['DS_ACCELERATOR'] = 'cpu'\nos.environ['TOKENIZERS_PARALLELISM'] = 'true'\nx.environ", {}),
        ("os.environ['RANK'] = '0'\nos.environ['MASTER_PORT'] = '1'\nos.environ['LD_PRELOAD'] = 'a.so'", {}),
        ("not python", {}),
        ("", {}),
        ("\0", {}),
    ],
)
def test_what_a_script_sets_at_its_top(text: str, expected: dict[str, str]) -> None:
    assert left(text) == expected


def test_odd_escapes_are_not_complained_of(recwarn: pytest.WarningsRecorder) -> None:
    assert left("x = '\\d'\nos.environ['HF_HOME'] = '/a'") == {"HF_HOME": "/a"}
    assert not recwarn.list


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import os, sys", {"HF_HOME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}),
        ("from transformers.models import x", {"CUDA_VISIBLE_DEVICES"}),
        ("try:\n    import datasets\nexcept ImportError:\n    pass", {"CUDA_VISIBLE_DEVICES"}),
        ("def f():\n    import transformers", {"HF_HOME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}),
        ("from .transformers import x", {"HF_HOME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}),
    ],
)
def test_after_the_import_of_what_reads_it_it_means_nothing(imports: str, expected: set[str]) -> None:
    text = "environ.update(HF_HOME='/a', OMP_NUM_THREADS='2', CUDA_VISIBLE_DEVICES='1')"
    assert left(f"{imports}\n{text}").keys() == expected


def test_a_default_gives_way() -> None:
    text = "os.environ.setdefault('HF_HOME', '/a')\nos.environ.setdefault('HF_HOME', '/b')\n"
    assert left(text) == {"HF_HOME": "/a"}
    assert left(text, HF_HOME="/mine") == {}
    assert left(f"{text}os.environ['HF_HOME'] = '/c'", HF_HOME="/mine") == {"HF_HOME": "/c"}


def test_what_came_too_late() -> None:
    before = {"HF_HOME": "/a", "NCCL_ALGO": "Ring", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    now = {
        "HF_HOME": "/b",
        "PATH": "/sbin",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "a:1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_MODULE_LOADING": "LAZY",
        "HF_TOKEN": "secret",
    }
    assert set_late(before, now) == ["HF_HOME", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF"]
    assert set_late(now, now) == []
    seen = [*set_late(before, now), "CUDA_VISIBLE_DEVICES"]
    assert of_the_device(seen) == ["NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF"], "ranks are chosen their devices"
    assert too_late([]) == ""
    assert too_late(["HF_HOME", "NCCL_ALGO"]).startswith(
        "HF_HOME, NCCL_ALGO: set by the script's code, after its ranks"
    )
