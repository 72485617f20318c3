"""The browser of the report tests."""

from tests.reporting.conftest import browser as browser
