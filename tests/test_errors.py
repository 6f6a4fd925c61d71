"""Messages that people can read, whatever they quote; paths as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipless.errors import LONGEST_MESSAGE, MissingExtra, UserError, bounded, unknown, user_path


@given(st.text(st.characters(), max_size=50), st.integers(0, 200))
def test_a_message_is_never_too_long(text, times):
    shown = bounded("begins " + text * times + " ends")
    assert len(shown.encode(errors="backslashreplace")) <= LONGEST_MESSAGE
    assert shown.startswith("begins ")
    assert shown.endswith(" ends")


def test_a_short_message_is_as_it_was():
    assert bounded("x" * LONGEST_MESSAGE) == "x" * LONGEST_MESSAGE
    assert "pip install 'skipless[hf]'" in str(MissingExtra("transformers", "hf", "this"))


def test_errors_bound_what_they_quote():
    assert len(str(UserError("x" * 10**7))) <= LONGEST_MESSAGE
    assert len(str(unknown("key", "y" * 10**6, ["a", "b"]))) <= LONGEST_MESSAGE


def test_paths_of_nobody_are_a_users_mistake(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x") == tmp_path / "x"
    for wrong in ("~nobody-of-that-name/x", "a\0b"):
        with pytest.raises(UserError):
            user_path(wrong)
