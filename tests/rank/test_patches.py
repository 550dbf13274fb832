import os
from typing import Any

import pytest

from autotune.rank.patches import Call, Patches


class Base:
    def greet(self, name: str) -> str:
        """Says hello."""
        return f"hello {name}"


class Derived(Base):
    pass


def loudly(call: Call) -> Any:
    return call().upper()


def test_a_method_is_wrapped_and_put_back() -> None:
    patches, before = Patches(), Base.__dict__["greet"]
    patches.wrap(Base, "greet", loudly)
    assert Base().greet("you") == Base().greet(name="you") == "HELLO YOU"
    assert Base.greet.__doc__ == "Says hello."
    assert patches.original(Base, "greet") is before
    patches.close()
    assert Base.__dict__["greet"] is before
    assert patches.original(Base, "greet") is before


def test_an_inherited_method_is_inherited_again() -> None:
    patches = Patches()
    patches.wrap(Derived, "greet", loudly)
    assert (Derived().greet("you"), Base().greet("you")) == ("HELLO YOU", "hello you")
    patches.close()
    assert "greet" not in vars(Derived)


def test_patches_over_patches_come_off_in_order() -> None:
    patches, before = Patches(), Base.__dict__["greet"]
    patches.wrap(Base, "greet", loudly)
    patches.wrap(Base, "greet", lambda call: call() + "!")
    assert Base().greet("you") == "HELLO YOU!"
    assert patches.original(Base, "greet") is before
    patches.close()
    assert Base.__dict__["greet"] is before


def test_arguments_may_have_any_name() -> None:
    """A batch is given by its own names."""

    class Engine:
        def forward(self, **batch: int) -> int:
            return sum(batch.values())

    patches = Patches()
    patches.wrap(Engine, "forward", lambda call: -call())
    assert Engine().forward(original=1, around=2, owner=3, name=4) == -10
    patches.close()


def test_a_call_has_its_arguments_by_name_and_takes_others() -> None:
    def load(folder: str, tag: str | None = None, *, strict: bool = True, **more: int) -> list[Any]:
        return [folder, tag, strict, more]

    call = Call(load, ("a",), {"step": 3})
    assert call.given == {"folder": "a", "tag": None, "strict": True, "more": {"step": 3}}
    call.change(tag="b", strict=False)
    assert call() == ["a", "b", False, {"step": 3}]


def test_variables_come_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_OLD", "old")
    monkeypatch.delenv("AUTOTUNE_NEW", raising=False)
    patches, undone = Patches(), []
    for name in ("AUTOTUNE_OLD", "AUTOTUNE_NEW"):
        patches.set_environment(name, "new")
    patches.callback(lambda: undone.append(True))
    assert (os.environ["AUTOTUNE_OLD"], os.environ["AUTOTUNE_NEW"]) == ("new", "new")
    patches.close()
    patches.close()
    assert os.environ["AUTOTUNE_OLD"] == "old"
    assert "AUTOTUNE_NEW" not in os.environ
    assert undone == [True]
