"""Messages name a few of many things, and errors of the system and of libraries become those of the project."""

import errno
from typing import Any

import pytest

from zeromesh.errors import ConfigError, DataError, StorageError, library_errors, ranks_text, refused_path, some, summary


def test_the_first_names_and_the_number_of_the_others() -> None:
    names = ["a", "b", "c", "d"]
    assert [some(names[:3]), some(names), some(names, 1), some(names, 4)] == [
        *("a, b, c", "a, b, c and 1 more", "a and 3 more", "a, b, c, d")
    ]
    assert ranks_text(range(4), 2) == "ranks 0, 1 and 2 more"
    assert ranks_text(range(5)) == "ranks 0, 1, 2, 3, 4"


def test_the_first_lines_of_an_error_that_say_something() -> None:
    error = ValueError("\n  first \n\n second\nthird")
    assert [summary(error), summary(error, 2)] == ["ValueError: first", "ValueError: first second"]
    assert summary(KeyError()) == "KeyError"


def test_one_problem_is_a_line_and_several_are_a_list() -> None:
    assert str(ConfigError("wrong")) == "wrong"
    assert str(ConfigError(["wrong"], where="here")) == "here: wrong"
    several = ConfigError(["wrong", "worse"], where="here")
    assert (several.problems, several.where) == (("wrong", "worse"), "here")
    assert str(several) == "here: 2 problems\n  - wrong\n  - worse"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        *(
            (OSError(getattr(errno, name), "why", "/a"), ConfigError, "'/a': why")
            for name in ("EACCES", "EPERM", "ENAMETOOLONG", "ENOTDIR", "ELOOP", "ENOENT")
        ),
        (OSError(errno.ENOENT, "why", b"/b"), ConfigError, "'/b': why"),
        (OSError(errno.ENOSPC, "why", "/a"), StorageError, "'/a': why"),
        (OSError(errno.ECONNRESET, "why", "/a"), StorageError, "'/a': why"),
        *((OSError(getattr(errno, name), "why"), StorageError, "why") for name in ("EIO", "ESTALE", "EROFS", "ENOSPC", "EDQUOT")),
        (OSError(errno.ECONNRESET, "why"), None, ""),
        (OSError(errno.ENOENT, "why"), None, ""),
        (OSError("why"), None, ""),
    ],
)
def test_a_path_that_the_system_refuses_is_the_users_and_a_disk_that_fails_is_not(error: OSError, kind: Any, text: str) -> None:
    found = refused_path(error)
    assert (type(found), str(found)) == (kind, text) if kind else found is None


class Panic(BaseException):
    """What a library of Rust raises."""


def test_errors_of_libraries_are_those_of_a_key() -> None:
    for error in (ValueError("one\ntwo\nthree"), Panic("one\n\ntwo")):
        with pytest.raises(ConfigError) as caught, library_errors("data.train", "unreadable: "):
            raise error
        assert str(caught.value) == f"data.train: unreadable: {type(error).__name__}: one two"
        assert caught.value.__cause__ is error
    with pytest.raises(DataError, match=r"^unreadable: OSError: why$"), library_errors("unused", "unreadable: ", DataError):
        raise OSError("why")
    for passed in (StorageError("full"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
        with pytest.raises(type(passed)) as same, library_errors("data.train"):
            raise passed
        assert same.value is passed
