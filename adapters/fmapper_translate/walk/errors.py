"""Errors of a walk."""

from __future__ import annotations

from fmapper import ConversionError


class NotTranscribed(ConversionError):
    """Something of the source has no counterpart."""


class Varied(NotTranscribed):
    """An expression has other code for other evaluations."""


class Unnamed(NotTranscribed):
    """A name of the source that a file cannot have."""
