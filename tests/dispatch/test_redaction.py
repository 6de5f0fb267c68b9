"""No credential and no quoted row leaves through a text (R-X2)."""

from __future__ import annotations

import io
import json
import logging
import time
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.redaction import RedactingFilter, redact, secrets_known, secrets_of

NASTY = "p@ss/w:rd %'\"\\ü 1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://app:hunter2@db:5432/shop", "postgresql://app:***@db:5432/shop"),
        ("redis://:hunter2@cache/0", "redis://:***@cache/0"),
        ("mysql+pymysql://a:hun%74er2@h/d", "mysql+pymysql://a:***@h/d"),
        ("x://a:hunter2@x/hunter2@h/d", "x://a:***@h/d"),
        ("İİİİİİ://aİİİİ:hunter2@h/d", "İİİİİİ://aİİİİ:***@h/d"),
        ("no password here postgresql://app@db/shop", None),
        ("http://localhost:8080/path", None),
        ("?url=postgresql%3A%2F%2Fapp%3Ahunter2%40db", "?url=postgresql%3A%2F%2Fapp%3A***%40db"),
        ("postgresql://db/x?password=hunter2&sslmode=require",
         "postgresql://db/x?password=***&sslmode=require"),
        ("postgresql://db/x?sslmode=require&sslpassword=hunter2",
         "postgresql://db/x?sslmode=require&sslpassword=***"),
        ("host=db password=hunter2 dbname=x", "host=db password=*** dbname=x"),
        ("host=db password = 'hunter2 hunter2' dbname=x", "host=db password = '***' dbname=x"),
        (r"host=db password='hun\'ter2' dbname=x", "host=db password='***' dbname=x"),
        ("host=db password=hun\\ ter2 dbname=x", "host=db password=*** dbname=x"),
        ("password='hunter2 cut", "password='***'"),
        ("host=db sslpassword=hunter2", "host=db sslpassword=***"),
        ('{"password": "hunter2", "user": "a"}', '{"password": "***", "user": "a"}'),
        ("{'api_key': 'hunter2'}", "{'api_key': '***'}"),
        ("password: hunter2", "password: ***"),
        ("lease_token=hunter2", "lease_token=***"),
        ("ALTER ROLE a PASSWORD 'hunter2'", "ALTER ROLE a PASSWORD '***'"),
        ("create user a identified by 'hunter2'", "create user a identified by '***'"),
        ('FATAL: password authentication failed for user "app"', None),
        ('relation "secret" does not exist', None),
    ],
)  # fmt: skip
def test_shapes_of_credentials__R_X2(text: str, expected: str | None) -> None:
    redacted = redact(text)
    assert "hunter2" not in redacted
    assert redacted == (text if expected is None else expected)
    assert redact(redacted) == redacted


@pytest.mark.parametrize(
    "printed",
    [
        NASTY, quote(NASTY), quote(NASTY, safe=""), quote(NASTY, safe="").lower(),
        json.dumps(NASTY), json.dumps(NASTY, ensure_ascii=False), repr(NASTY),
        NASTY.replace("'", "''"), NASTY.replace("\\", "\\\\").replace("'", "\\'"),
        NASTY.replace("%", "%25").replace(" ", "+").replace("@", "%40").replace("/", "%2F")
        .replace(":", "%3A").replace("'", "%27").replace('"', "%22").replace("\\", "%5C")
        .replace("ü", "%C3%BC"),
    ],
)  # fmt: skip
def test_a_known_secret_in_each_encoding__R_X2(printed: str) -> None:
    redacted = redact(f"could not log in with {printed}, sorry", [NASTY])
    assert redacted.replace('"***"', "***").replace("'***'", "***") == (
        "could not log in with ***, sorry"
    )


@pytest.mark.parametrize("secret", ["a\\%b", "\\%(", "%2f%2F(", "100%"])
def test_a_known_secret_with_a_percent_sign__R_X2(secret: str) -> None:
    assert redact(f"no {secret} here", [secret]) == "no *** here"


def test_a_short_secret_does_not_take_words_apart() -> None:
    assert redact("an apple a day", ["a", "pp"]) == "an apple *** day"
    assert redact("nothing", ["", " "]) == "nothing"


def test_the_longest_secret_goes_first() -> None:
    assert redact("hunter22", ["hunter", "hunter22"]) == "***"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"url": "postgresql://app:hunter2@db/x"}, {"hunter2"}),
        ({"url": "postgresql://app:hun%40ter2@db/x"}, {"hun%40ter2", "hun@ter2"}),
        ({"url": "postgresql://app:a@b@db/x"}, {"a@b", "a"}),
        ({"url": "postgresql://db/x?password=a%20b&sslmode=require"}, {"a%20b", "a b"}),
        ({"url": "host=db password='a \\' b' user=x"}, {"a ' b"}),
        ({"url": "host=db password=hunter2 user=x"}, {"hunter2"}),
        ({"url": "x://a:b@c/d@e f://g:h@i"}, {"b@c/d", "b", "h"}),
        ({"url": "x://h/?a=b?sslpassword=c&my.token-1=d#e"}, {"c", "d"}),
        ({"url": "password-token=a sslpasswords = b"}, {"a", "b"}),
        ({"url": "sqlite:///x.db"}, set()),
        ({"path": "/data", "format": "csv"}, set()),
        ({"options": {"api_key": "k", "port": 5}, "secrets": ["x", 7]}, {"k", "x", "7"}),
    ],
)
def test_the_secrets_of_a_configuration(config: dict, expected: set[str]) -> None:
    assert secrets_of(config) == expected


def test_a_password_leaves_with_the_block_that_knew_it() -> None:
    with secrets_known(["hunter2"]):
        with secrets_known(["hunter2", "other"]):
            assert redact("hunter2 other") == "*** ***"
        assert redact("hunter2 other") == "*** other"
    assert redact("hunter2 other") == "hunter2 other"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('duplicate key\nDETAIL:  Key (mail)=(ann@x) already exists.\nHINT:  think',
         'duplicate key\nDETAIL:  ***\nHINT:  think'),
        ("null value\nDETAIL:  Failing row contains (1, two\nlines, ann@x).",
         "null value\nDETAIL:  ***"),
        ("Access denied for user 'u'@'h' (using password: YES) (error 1045)", None),
        ("Access denied for user 'u'@'h' (using password: NO)", None),
        ("(using password: YES)hunter2", "(using password: ***"),
        ("(using password: hunter2)", "(using password: ***"),
        ("password: YES)", "password: ***"),
        ('bad\nCONTEXT:  COPY orders, line 3, column mail: "ann@x"',
         'bad\nCONTEXT:  COPY orders, line 3, column mail: ***'),
        ('bad\nCONTEXT:  COPY orders, line 3: "1\tann@x"',
         'bad\nCONTEXT:  COPY orders, line 3: ***'),
        ("bad\nCONTEXT:  COPY orders, line 3", None),
        ("deadlock detected\nDETAIL:  Process 1 waits for ShareLock on transaction 2; blocked by "
         "process 3.\nProcess 3 waits for ShareLock on transaction 4; blocked by process 1.", None),
        ('bad\nCONTEXT:  while updating tuple (0,1) in relation "t"', None),
        ('invalid input syntax for type integer: "ann@x"\nLINE 1: select 1',
         'invalid input syntax for type integer: ***\nLINE 1: select 1'),
        ('invalid input value for enum mood: "ann@x"', "invalid input value for enum mood: ***"),
        ("(1062, \"Duplicate entry 'ann@x' for key 'mail'\")",
         "(1062, \"Duplicate entry *** for key 'mail'\")"),
        ("(1062, \"Duplicate entry 'ann@x' was found\")\nand more",
         "(1062, \"Duplicate entry ***\nand more"),
        ('malformed array literal: "ann@x" and more', "malformed array literal: ***"),
        ("Duplicate entry 'ann@x', password='1\nann@x' and more", "Duplicate entry ***"),
        ("password='x ann@x\\", "password='***'"),
        ("boom\n[SQL: insert into t values (%s)]\n[parameters: ('ann@x',)]\n(Background on this "
         "error at: https://sqlalche.me/e/20/gkpj)",
         "boom\n[SQL: insert into t values (%s)]\n[parameters: ***]\n(Background on this "
         "error at: https://sqlalche.me/e/20/gkpj)"),
    ],
)  # fmt: skip
def test_row_data_that_a_database_quotes__R_X2(text: str, expected: str | None) -> None:
    redacted = redact(text)
    assert "ann@x" not in redacted
    assert redacted == (text if expected is None else expected)
    assert redact(redacted) == redacted


def test_an_error_of_the_driver_itself__R_X2() -> None:
    with pytest.raises(psycopg.OperationalError) as caught:
        psycopg.connect("postgresql://app:hunter2@127.0.0.1:1/x?connect_timeout=2", password="h3")
    assert "hunter2" not in redact(str(caught.value), ["hunter2"])
    with pytest.raises(psycopg.ProgrammingError) as malformed:
        psycopg.connect("host=db password=hunter2 nonsense")
    assert "hunter2" not in redact(str(malformed.value))


def test_the_log_filter_covers_message_arguments_and_traceback__R_X2() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    logger = logging.getLogger("tests.redaction")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.warning("cannot reach %s", "postgresql://app:hunter2@db/x")
        with secrets_known(["tiger9"]):
            try:
                raise ValueError("wrong: tiger9 and password=hunter2")
            except ValueError:
                logger.exception("failed with %s", "tiger9", stack_info=True)
        logger.warning("%d", "password=hunter2")
    finally:
        logger.removeHandler(handler)
    text = stream.getvalue()
    assert "hunter2" not in text
    assert "tiger9" not in text
    assert "cannot reach postgresql://app:***@db/x" in text
    assert "ValueError: wrong: *** and password=***" in text
    assert "%d [its arguments do not fit]" in text


@pytest.mark.parametrize(
    "text",
    [
        "a-" * 131072, "://" * 87000, "password" * 32768, "?&" * 131072, "%3A%2F%2F" * 29000,
        "DETAIL: " * 32768, "'" * 262144, "password='" * 26000, "[parameters: " * 20000,
        "\\" * 262144, "x://a:" * 43000,
        "Duplicate entry '17' was found; " * 8000, "Incorrect x value: '" * 13000,
        'invalid input syntax for type integer: "abc" at row 1; ' * 4700,
        'malformed array literal: "' * 10000, "password=''''" * 20000, 'password="\\' * 23000,
        "identified " * 23000, "timestamp" * 29000, "DETAIL:\n" * 32768, "\nLINE 1" * 37000,
        "DETAIL: Process 1 waits for x\n" * 8000,
    ],
)  # fmt: skip
def test_hostile_text_costs_little_time(text: str) -> None:
    started = time.perf_counter()
    redact(text, ["hunter2"])
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize(
    "part", ["Duplicate entry '17' was found; ", 'malformed array literal: "abc" at row 1; ']
)
def test_the_time_grows_with_the_length_alone(part: str) -> None:
    def least_time(text: str) -> float:
        times = []
        for _ in range(3):
            started = time.process_time()
            redact(text)
            times.append(time.process_time() - started)
        return min(times)

    # Four times the text took sixteen times as long.
    assert least_time(part * 16000) < 10 * least_time(part * 4000)


@pytest.mark.parametrize(
    "text",
    [
        "://a:" * 20000, "x://" + "://a:" * 20000, "?password" * 11000, "x://?" + "token" * 20000,
        "password" * 12500, "password=" * 11000, "password='" * 10000, "password='\\'" * 8000,
        "password " * 11000,
    ],
)  # fmt: skip
def test_a_hostile_configuration_costs_little_time(text: str) -> None:
    started = time.perf_counter()
    secrets_of({"url": text})
    assert time.perf_counter() - started < 3


def test_a_limit_bounds_the_answer_and_the_time() -> None:
    text = "postgresql://app:hunter2@db/x is at http://localhost:8080/path, it says; " * 400_000
    started = time.perf_counter()
    redacted = redact(text, limit=1000)
    assert time.perf_counter() - started < 0.5
    assert redacted == redact(text[:8000])[:1000]
    assert redact("short", limit=5) == redact("short", limit=None) == "short"
    assert redact("longer", limit=5) == "longe"
    assert redact("longer", limit=0) == ""


# Each character of the secret is one that stands nowhere else.
SHAPES = [
    "x postgresql://app:#@db/x y", "x redis://:#@cache/0", "x://a:#@#@h/d",
    "?url=postgresql%3A%2F%2Fapp%3A#%40db y", "postgresql://db/x?sslpassword=#&a=b",
    "host=db password=# dbname=x", "host=db password = '# # # # #' y",
    r"host=db password='#\'#\\#' y", r"host=db password=#\ #\\# y", '{"password": "# #"} y',
    r'{\"password\": \"#\"} y', "ALTER ROLE a PASSWORD '# ''#' y", "identified by '# #'",
    "bad\nDETAIL:  Key (mail)=(#) already exists.\nHINT:  think",
    'bad\nCONTEXT:  COPY orders, line 3, column mail: "# #"\nHINT: think',
    'invalid input syntax for type integer: "# " #\n#"\nLINE 1: select 1',
    "(1062, \"Duplicate entry '# '#\n#' for key 'mail'\")",
    "identified by 'Duplicate entry '#' for key",
    "boom\n[SQL: insert]\n[parameters: ('#', '#')]\n(Background on this error at: https://x)",
    "known as §§§§ § §§§§ here", "known as " + quote("§§§§ § §§§§") + " here",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cut_through_a_secret_shows_no_part_of_it__R_X2(
    monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    text = shape.replace("#", "§§§§")
    known = ["§§§§ § §§§§"]
    shown = ("§", *quote("§").split("%")[1:])
    # Much that is masked, so that the answer has room for all that was read.
    before = "password=" + "y" * 5000 + " "
    for cut in range(len(text) + 1):
        redacted = redact(before + text, known, limit=len(before) + cut - 4096)
        assert not any(part in redacted for part in shown), (cut, redacted)
    monkeypatch.setattr("dispatch.redaction._MARGIN", 0)
    for cut in range(len(text) + 1):
        redacted = redact(text, known, limit=cut)
        assert len(redacted) <= cut
        assert not any(part in redacted for part in shown), (cut, redacted)


PARTS = [
    *("'", '"', "''", "\\", " ", "\n", "@", ":", "/", "?", "&", "=", "a", "%40", "%3A", "x://a:"),
    *("password=", "&token=", "DETAIL: ", "\nHINT: ", "[parameters: ", "]", "identified by '"),
    *("Duplicate entry '", "' for key", 'malformed array literal: "', "§", "¶", "¤", "known"),
]


@given(st.lists(st.sampled_from(PARTS), max_size=30), st.integers(0, 100), st.integers(0, 20))
def test_a_cut_shows_nothing_that_the_whole_hides__R_X2(
    parts: list[str], limit: int, margin: int
) -> None:
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dispatch.redaction._MARGIN", margin)
        redacted = redact(text, ["known §"], limit=limit)
    assert len(redacted) <= limit
    assert set("§¶¤") & set(redacted) <= set("§¶¤") & set(redact(text, ["known §"]))


def test_what_a_library_takes_for_the_host_of_an_unencoded_password_is_redacted__R_X2() -> None:
    secrets = secrets_of({"url": "postgresql://me:topsecret@hunter2tail@127.0.0.1/shop"})
    told = redact("failed to resolve host 'hunter2tail@127.0.0.1'", secrets)
    assert told == "failed to resolve host '***@127.0.0.1'"
