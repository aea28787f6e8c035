"""Texts for trainers lose secrets and personal data; the same text gets the same placeholder."""

import json
import random
import re
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from tests.support.planted import SECRETS
from tests.support.slopes import is_steep
from tests.support.traces import sample_traces


@cache
def redaction() -> Any:
    """Import the module late.

    It compiles the rules for secrets, which would take seconds in every process that collects this file.
    """
    return import_module("kp_scorer.checks.redaction")


PERSONAL = {
    "EMAIL": (
        *("bob.smith@corp.example.org", "a+b@sub.example.com", "eve%40example.org"),
        *("sean.o'brien@example.com", "o''brien@example.com", "D’Angelo@example.it", "eve%2540example.org"),
        *("eve@münchen.example", "ева@пример.рф", "请写信给eve@example.org", "_eve@example.org_", "__eve@example.org__"),
    ),
    "PHONE": ("+1 202-555-0143", "(212) 736-5000", "+49 30 901820", "+45 33 12 34 56"),
    "CARD": ("4111 1111 1111 1111", "5555-5555-5555-4444", "378282246310005"),
    "USER": (
        *("/home/alice/notes", "/Users/Bob.Jones/x", r"C:\Users\carl\x", "C:/Users/dora", "/mnt/c/Users/eli/x"),
        *(".claude/projects/-Users-fay-shop/a.jsonl", "projects/C--Users-gus-shop", "./-home-hal"),
        *("/var/home/ida/x", "cc -I/home/jon/include"),
    ),
}


@pytest.mark.parametrize("kind", PERSONAL)
def test_personal_data_is_replaced(kind: str) -> None:
    for text in PERSONAL[kind]:
        for template in (
            "{}",
            "Call or write to {} today.",
            "It is {}.",
            "It is *{}*.",
            '{{"contact": "{}"}}',
            r'{{"n": 1}} {{"n": "2\n{}\t3"}}',
        ):
            content = template.format(text)
            assert [category for _, _, category in redaction().spans_in(content)] == [kind], content
            redacted = redaction().Redactor().redacted(content)
            assert f"[{kind}_1]" in redacted
            assert redaction().is_clean(redacted)


INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"


@pytest.mark.parametrize("hidden", [*INVISIBLE, r"\u200b", r"\\u00AD", "\u200d" * 3])
def test_invisible_characters_within_them_hide_no_secrets(hidden: str) -> None:
    secrets = [SECRETS["Stripe key"](random.Random(3)), *(PERSONAL[kind][0] for kind in ("EMAIL", "PHONE", "CARD"))]
    for text in (*secrets, "/home/alice"):
        disguised = text[:2] + hidden + text[2:-2] + hidden + text[-2:]
        assert not redaction().is_clean(f"It is {disguised} now"), text
        redacted = redaction().Redactor().redacted(f"ø It is {disguised} now")
        assert re.fullmatch(r"ø It is (/\S+/)?\[[A-Z]+_1\] now", redacted), redacted


@pytest.mark.parametrize("escape", [r"\u0040", r"\\u0040", r"\\\\u0040"])
def test_an_address_whose_at_sign_is_escaped_is_replaced_with_its_escape(escape: str) -> None:
    text = f'Read: {{"to": "eve{escape}example.or{escape[:-4]}0067"}}'
    assert not redaction().is_clean(text)
    assert redaction().Redactor().redacted(text) == 'Read: {"to": "[EMAIL_1]"}'


@pytest.mark.parametrize("sign", ["&#64;", "&#064;", "&#x40;", "&commat;", r"\x40", r"\\x40", "＠"])
def test_an_address_whose_at_sign_is_spelt_otherwise_is_replaced(sign: str) -> None:
    text = rf"<p>Café</p> &#171;eve{sign}example.org&#187; \x0aeve{sign}example.org"
    redacted = redaction().Redactor().redacted(text)
    assert redacted == r"<p>Café</p> &#171;[EMAIL_1]&#187; \x0a[EMAIL_1]"
    assert redaction().is_clean(redacted)


def test_an_address_of_which_every_character_is_a_reference_is_replaced_whole() -> None:
    # Markdown writes the addresses of links in this way.
    address = "".join(f"&#x{ord(each):X};" if place % 2 else f"&#{ord(each)};" for place, each in enumerate("eve@example.org"))
    assert redaction().Redactor().redacted(f'<a href="&#109;ailto:{address}">') == '<a href="&#109;ailto:[EMAIL_1]">'


@pytest.mark.parametrize("escape", [r"\/", r"\\/", r"\\\/"])
def test_secrets_with_escaped_slashes_are_replaced_whole(escape: str) -> None:
    # PHP writes slashes in this way.
    chance = random.Random(5)
    secrets = [SECRETS[kind](chance) for kind in ("Slack webhook", "AWS key pair", "password in a MongoDB URL")]
    for secret in (*secrets, "redis://:vcvQKsOg4lrlV5@host:6379/0", "/home/alice/x"):
        text = f'Read: {{"n": "{secret}"}}'
        redacted = redaction().Redactor().redacted(text.replace("/", escape))
        assert redaction().is_clean(redacted)
        assert redacted.replace(escape, "/") == redaction().Redactor().redacted(text)


@pytest.mark.parametrize("literal", ["f'{}'", r"N\'{}\'", "b'{}'", "u'{}', x'y'", "LIKE'{}'", "['{}']", "write to '{}'."])
def test_a_quote_before_an_address_stays(literal: str) -> None:
    assert redaction().Redactor().redacted(literal.format("eve@example.org")) == literal.format("[EMAIL_1]")


@pytest.mark.parametrize("before", ["请写信给" * 20, r"\u8bf7\u5199" * 40, r"\ud83d\ude00", "x" * 70 + r"\u00e9"])
def test_an_address_behind_letters_without_a_space_leaves_whole_escapes(before: str) -> None:
    redacted = redaction().Redactor().redacted(f'Read: "{before}eve@example.org"')
    assert re.fullmatch(r'Read: "([^\\]|\\u[0-9a-f]{4})*\[EMAIL_1\]"', redacted), redacted


def test_invisible_characters_around_secrets_stay() -> None:
    text = "\ufeffمی‌خواهم \u200ceve@example.org\u200c 👩\u200d💻\u200beve@example.org\x1b[0m"
    assert redaction().Redactor().redacted(text) == text.replace("eve@example.org", "[EMAIL_1]")


@pytest.mark.parametrize(
    "text",
    [
        "eve@example.org+49 30 901820",
        "(212) 736-5000(212) 736-5001",
        "4111 1111 1111 1111/home/alice/notes",
        r"C:\Users\carl/home/alice",
        '["/home/alice/home/bob"]',
    ],
)
def test_what_a_placeholder_reveals_beside_it_is_replaced(text: str) -> None:
    redacted = redaction().Redactor().redacted(text)
    assert redaction().is_clean(redacted), redacted
    assert redacted.count("_1]") + redacted.count("_2]") == 2


def test_planted_secrets_are_replaced_and_none_is_left() -> None:
    chance, missed = random.Random(7), []
    for kind, make in SECRETS.items():
        secret = make(chance)
        redacted = redaction().Redactor().redacted({"content": f"I ran it with {secret}, which worked: ø"})
        if "[SECRET_1]" not in redacted["content"]:
            missed.append(kind)
        assert redaction().is_clean(redacted)
    # The check for secrets misses some of these kinds, most of which only a name beside them gives away.
    assert set(missed) <= {"assigned password", "password in JSON", "password in escaped JSON", "OpenAI key"}


@pytest.mark.parametrize(
    "template",
    [
        *("It failed (see {}).", "**{}**", "| {}| key |", 'It was "{}", then', "({}), [{}];"),
        *(r'Read: {"n": "2\n{}\n3"}', r'Read: {"n": "2\t{}"}', r'Read: {"n": "{\"n\": \"2\\n{}.\\n3\"}"}'),
    ],
)
def test_secrets_are_found_whatever_is_around_them(template: str) -> None:
    chance = random.Random(3)
    for kind in ("Stripe key", "Google API key", "JSON web token", "Vault token"):
        secret = SECRETS[kind](chance)
        assert secret not in redaction().Redactor().redacted(template.replace("{}", secret)), kind


def test_secrets_are_found_however_often_they_are_escaped() -> None:
    text = json.dumps({"password": "vcvQKsOg4lrlV5"})
    for _ in range(4):
        text = json.dumps({"note": text})
        assert "vcvQKsOg4lrlV5" not in redaction().Redactor().redacted(f"It wrote {text} (ø).")


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:a/b react@18.2.0 @app.route x@y",
        "1706054597 1706054597123456789 3.14159265358979 550e8400-e29b-41d4-a716-446655440000",
        "192.168.100.201 2026-11-28 01:06:26 1234 5678 9012 3456 +1234567890",
        "/home/user/x https://site.example/home/products ~/home/x /Users/Shared /home/ C:\\Windows\\Users",
        "👨\u200d👩\u200d👧\u200d👦 ❤\ufe0f\u200d🔥 می\u200cخواهم کتاب\u200cها क्\u200dष",
        "\ufeffDonau\u00addampf\u00adschiff 1\u2060000\u2060000 \x1b[31mred\x1b[0m ประเทศ\u200bไทย",
        r"caf\u00e9 \ud83d\ude00 C:\users\u0041 \u200b {\"react\\u0040\": \"18.2.0\"} \u12",
        r"b'\x7fELF\x02\x40\x1b[0m' [\x21-\x7e@] react&#64;18.2.0 &#0; &#9999999; &#x110000; a&#39;b \x4 AT&T ＠app.route",
        r"a\/b s/\/opt\/home\/x/y/ <\/p> https:\/\/site.example\/home\/products",
        "at-home-care stay--home-alone ./a-Users-guide -Users- /-home-user-x 4111111111111111.5",
    ],
)
def test_texts_that_only_look_like_personal_data_stay(text: str) -> None:
    assert redaction().Redactor().redacted(text) == text


def test_real_texts_stay() -> None:
    texts = [json.dumps(trace) for trace in sample_traces()]
    assert [text for text in texts if redaction().spans_in(text)] == []


def test_one_text_has_one_placeholder_and_json_in_a_text_stays_json() -> None:
    redactor = redaction().Redactor()
    arguments = json.dumps({"to": "eve@example.org", "password": "xK9#mP2vL5nQ8wZ"})
    redacted = redactor.redacted({"content": "eve@example.org, bob@example.org", "arguments": arguments, "n": [1, None]})
    assert redacted["content"] == "[EMAIL_1], [EMAIL_2]"
    assert json.loads(redacted["arguments"]) == {"to": "[EMAIL_1]", "password": "[SECRET_1]"}
    assert redacted["n"] == [1, None]
    assert redactor.counts == {"email": 3, "secret": 1}
    # Redacting a second time does not take a placeholder for a password.
    assert redaction().is_clean(redacted)
    assert redactor.redacted(redacted) == redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"card": 4111111111111111, "n": 1706054597123}', {"card": "[CARD_1]", "n": 1706054597123}),
        ('{"token": 123456789012345, "a": true}', {"token": "[SECRET_1]", "a": True}),
        ("[4111111111111111, 55.4111111111111111]", ["[CARD_1]", 55.41111111111111]),
        (r'{"token=xK9#mP2vL5nQ8wZabcd": "eve@example.org", "a": {}}', {"[SECRET_1]": "[EMAIL_1]", "a": {}}),
    ],
)
def test_json_in_a_text_stays_json_if_a_number_or_a_key_is_replaced(text: str, expected: object) -> None:
    redacted = redaction().Redactor().redacted(text)
    assert json.loads(redacted) == expected
    assert redaction().is_clean(redacted)


def test_an_address_behind_an_escape_is_the_same_address_and_the_escape_stays() -> None:
    text = r'Read: {"to": "eve@example.org\neve@example.org"}'
    assert redaction().Redactor().redacted(text) == r'Read: {"to": "[EMAIL_1]\n[EMAIL_1]"}'


def test_secrets_behind_half_a_character_are_replaced() -> None:
    assert redaction().Redactor().redacted("cut \ud83d, password: xK9#mP2vL5nQ8wZ") == "cut \ud83d, [SECRET_1]"


@pytest.mark.parametrize(
    "piece",
    [
        *("a", "1", "+1 ", "x@", "/home/", "4111 ", "a.b@c.", "(123) ", "1-", ").", "|", "\\", "\\n", "é@é.", "é"),
        *("\u200b", "x\u200b@", "\\u0040", "u0", "[EMAIL_1] a@b.org ", "&#", "&#64;", "\\x40", "o'"),
    ],
)
def test_time_is_linear_in_hostile_texts(piece: str) -> None:
    assert not is_steep(redaction().spans_in, lambda size: piece * size, 4_000)
