"""Fake secrets in the formats of real ones, and the places of a trace where they may be."""

import base64
import json
import random
import string
import zlib
from collections.abc import Callable, Mapping
from typing import Final

_LETTERS: Final = string.ascii_letters
_WORD: Final = _LETTERS + string.digits
_URL: Final = _WORD + "-_"
_HEX: Final = "0123456789abcdef"
_BASE62: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase
_BASE32: Final = string.ascii_uppercase + "234567"
_UPPER: Final = string.ascii_uppercase + string.digits


def _of(chance: random.Random, alphabet: str, length: int) -> str:
    return "".join(chance.choices(alphabet, k=length))


def _checksummed(chance: random.Random, prefix: str) -> str:
    """Return a token in the format of GitHub and npm, whose last six characters are the CRC of the others."""
    body, digits = _of(chance, _WORD, 30), ""
    crc = zlib.crc32(body.encode())
    while crc:
        crc, digit = divmod(crc, 62)
        digits = _BASE62[digit] + digits
    return prefix + body + digits.rjust(6, "0")


def _pem(chance: random.Random, name: str) -> str:
    body = base64.b64encode(chance.randbytes(1_190)).decode()
    lines = "\n".join(body[start : start + 64] for start in range(0, len(body), 64))
    return f"-----BEGIN {name}PRIVATE KEY-----\n{lines}\n-----END {name}PRIVATE KEY-----"


def _jwt(chance: random.Random) -> str:
    claims = json.dumps({"sub": _of(chance, string.digits, 9), "name": _of(chance, _LETTERS, 12)}).encode()
    parts = (b'{"alg":"HS256","typ":"JWT"}', claims, chance.randbytes(32))
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


SECRETS: Final[Mapping[str, Callable[[random.Random], str]]] = {
    "AWS key pair": lambda r: f"AWS_ACCESS_KEY_ID=AKIA{_of(r, _BASE32, 16)}\nAWS_SECRET_ACCESS_KEY={_of(r, _WORD + '/+', 40)}",
    "Azure storage key": lambda r: (
        f"AccountName=store;AccountKey={base64.b64encode(r.randbytes(64)).decode()};EndpointSuffix=x"
    ),
    "Google API key": lambda r: "AIza" + _of(r, _URL, 35),
    "GitHub token": lambda r: _checksummed(r, "ghp_"),
    "GitHub app token": lambda r: _checksummed(r, "ghs_"),
    "GitHub fine-grained token": lambda r: f"github_pat_{_of(r, _WORD, 22)}_{_of(r, _WORD, 59)}",
    "GitLab token": lambda r: "glpat-" + _of(r, _URL, 20),
    "npm token": lambda r: _checksummed(r, "npm_"),
    "PyPI token": lambda r: "pypi-AgEIcHlwaS5vcmcC" + _of(r, _URL, 150),
    "Docker Hub token": lambda r: "dckr_pat_" + _of(r, _URL, 27),
    "OpenAI key": lambda r: f"sk-proj-{_of(r, _URL, 74)}T3BlbkFJ{_of(r, _URL, 74)}",
    "Anthropic key": lambda r: f"sk-ant-api03-{_of(r, _URL, 93)}AA",
    "Hugging Face token": lambda r: "hf_" + _of(r, _LETTERS, 34),
    "Groq key": lambda r: "gsk_" + _of(r, _WORD, 52),
    "Slack token": lambda r: f"xoxb-{r.randrange(10**11, 10**12)}-{r.randrange(10**11, 10**12)}-{_of(r, _WORD, 24)}",
    "Slack webhook": lambda r: (
        f"https://hooks.slack.com/services/T{_of(r, _UPPER, 8)}/B{_of(r, _UPPER, 10)}/{_of(r, _WORD, 24)}"
    ),
    "Stripe key": lambda r: "sk_live_" + _of(r, _WORD, 24),
    "SendGrid key": lambda r: f"SG.{_of(r, _URL, 22)}.{_of(r, _URL, 43)}",
    "Twilio key": lambda r: "SK" + _of(r, _HEX, 32),
    "Telegram bot token": lambda r: f"{r.randrange(10**9, 10**10)}:AA{_of(r, _URL, 33)}",
    "Discord bot token": lambda r: f"M{_of(r, _WORD, 23)}.{_of(r, _WORD, 6)}.{_of(r, _URL, 27)}",
    "DigitalOcean token": lambda r: "dop_v1_" + _of(r, _HEX, 64),
    "Databricks token": lambda r: "dapi" + _of(r, _HEX, 32),
    "Shopify token": lambda r: "shpat_" + _of(r, _HEX, 32),
    "Grafana token": lambda r: f"glsa_{_of(r, _WORD, 32)}_{_of(r, _HEX, 8)}",
    "Vault token": lambda r: "hvs." + _of(r, _URL, 95),
    "JSON web token": _jwt,
    "RSA private key": lambda r: _pem(r, "RSA "),
    "OpenSSH private key": lambda r: _pem(r, "OPENSSH "),
    "PKCS 8 private key": lambda r: _pem(r, ""),
    "password in a PostgreSQL URL": lambda r: f"postgresql://app:{_of(r, _WORD, 16)}@db.corp:5432/orders",
    "password in a MongoDB URL": lambda r: f"mongodb+srv://svc:{_of(r, _WORD, 18)}@c0.{_of(r, _HEX, 5)}.mongodb.net/prod",
    "password in an HTTPS URL": lambda r: f"https://deploy:{_of(r, _WORD, 20)}@git.corp.io/repo.git",
    "Bearer header": lambda r: f"Authorization: Bearer {_of(r, _WORD, 40)}",
    "Basic header": lambda r: f"Authorization: Basic {base64.b64encode(b'admin:' + r.randbytes(12)).decode()}",
    "assigned API key": lambda r: f'api_key = "{_of(r, _WORD, 32)}"',
    "assigned client secret": lambda r: f"export CLIENT_SECRET={_of(r, _URL, 36)}",
    "assigned password": lambda r: f'DB_PASSWORD="{_of(r, _WORD + "!@#%^&*", 14)}"',
    "password in JSON": lambda r: json.dumps({"user": "admin", "password": _of(r, _WORD + "!@#%^&*", 14)}),
    "password in escaped JSON": lambda r: json.dumps(json.dumps({"password": _of(r, _WORD + "!@#%^&*", 14)})),
}
"""A function for each kind of secret, which returns a new one given a source of randomness."""

PLACES: Final = (
    *("task.objective", "task.input_schema.properties.note.default", "outcome.result_summary", "source_skill"),
    *("steps.0.content", "steps.0.output_summary", "steps.0.tool.name", "steps.0.tool.mcp_server", "steps.0.input.query"),
    *("steps.0.input.limits.0", "steps.1.content", "metadata.agent_id", "metadata.framework", "metadata.validated_by.0"),
    *("knowledge_graph_delta.entities.0.name", "knowledge_graph_delta.relationships.0.fact"),
)
"""The fields that may hold arbitrary text, as paths into ``maximal_payload``."""

HOSTILE: Final = (
    *("a", "=", "AKIA", "ghp_" + "a" * 30 + " ", 'password = "' + "x" * 7, "secret" * 3 + ":", "eyJ", "https://a:", "a://b:c@"),
    *(
        "-----BEGIN PRIVATE KEY-----\n",
        "authorization: bearer ",
        "sk-ant-api03-",
        "QUJD",
        "token\\",
        "curl -H ",
        "1234567890:AA",
    ),
)
"""Texts that are nearly a secret, for a test to repeat."""
