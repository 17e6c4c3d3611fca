"""Debian's Chromium without a window and without a network, for what reads pages: tests of them, and pictures."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "there is no chromium here: apt-get install chromium chromium-driver"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars")  # fmt: skip
PATIENCE = 60.0  # seconds for a page


@contextmanager
def browser() -> Iterator[Any]:
    """Selenium's driver, with the logs of console and network. Raises RuntimeError where there is no Chromium."""
    if not (CHROMIUM and DRIVER):
        raise RuntimeError(MISSING)
    sys.path.append(str(Path(sys.prefix, "browser")))  # tests/browser/requirements.txt
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def show(driver: Any, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> float:
    """Open a page of `report` and wait until its last chart is drawn; seconds that took, by the browser's own clock."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        driver.get_log(log)  # of the page before
    driver.get(path.absolute().as_uri())
    deadline = time.monotonic() + PATIENCE
    while not (drawn := driver.execute_script("return document.documentElement.dataset.drawn && performance.now()")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not drawn within {PATIENCE:.0f} s: {driver.get_log('browser')}")
        time.sleep(0.02)
    return float(drawn) / 1000
