"""A framework that is missing has its tests skipped, or fails the run where all must be there."""

import os

import pytest

REQUIRED = "PALSGD_FRAMEWORKS_REQUIRED"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get(REQUIRED) or reporter is None:
        return
    skipped = [str(report.longrepr) for report in reporter.stats.get("skipped", [])]
    if any("could not import" in reason for reason in skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
