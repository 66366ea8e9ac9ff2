"""Tests of files that are written from operations."""

import pytest

from fmapper import ConversionError


@pytest.fixture(autouse=True)
def only_operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `source` and the command transcribe nothing, but in the tests of transcription."""
    if "transcription" not in request.path.name:

        def refuse(*_: object) -> None:
            raise ConversionError("these tests look at operations")

        monkeypatch.setattr("fmapper.translation.source.transcribe", refuse)
