"""How the text of a checkpoint's config.ini is read: by who converts and serves it, and by who
only looks something up in it."""

from __future__ import annotations

import configparser

FILE_NAME = "config.ini"


def parse_ini(text: str) -> configparser.RawConfigParser:
    """The sections, without comments behind values. Raises configparser.Error."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read_string(text)
    return parser
