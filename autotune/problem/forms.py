"""Messages of pydantic in this package's words."""

from pydantic import BaseModel, ValidationError

from autotune.errors import did_you_mean
from autotune.util.bounds import display_value

_WORDS = {
    "Input should be": "expected",
    "Input is not": "expected",
    "Field required": "expected a value",
    "a valid boolean": "true or false",
    "a valid dictionary": "a mapping",
    "a valid integer": "a whole number",
    "a valid list": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def first_problem(error: ValidationError, form: type[BaseModel]) -> tuple[list[str], str]:
    """Return the place of the first problem in data of a form, and its description."""
    first = error.errors(include_url=False)[0]
    place = [*map(str, first["loc"])]
    if first["type"] == "value_error":
        return place, str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        known = [about.alias or name for name, about in form.model_fields.items()]
        return place, f"unknown{did_you_mean(place[-1], known)}; expected {', '.join(known)}"
    expected = first["msg"].partition(",")[0].partition(" for <class")[0]
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    return place, f"{expected}, found {display_value(first['input'])}"
