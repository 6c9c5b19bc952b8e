"""A headless Chromium for the report's page, and a helper that reads it and moves the pointer.

Without Chromium, its driver or selenium, these tests are skipped.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root may not have a sandbox, a container has little shared memory, and a new profile sends requests to the network.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
WIDTH, HEIGHT = 1440, 900


class Page:
    """An opened report: reads what it shows, operates it, and collects the browser's messages."""

    def __init__(self, driver: Any, path: Path, theme: str = "light") -> None:
        self.driver = driver
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False},
        )
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(path.as_uri())
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until the page has been drawn: frames are drawn one after the other."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => "
            "requestAnimationFrame(() => done())))"
        )

    def text(self, css: str) -> str:
        text: str = self.run("return document.querySelector(arguments[0]).textContent", css)
        return text

    def range(self) -> tuple[float, float]:
        start, end = self.run("return bpipeTimeline.range()")
        return float(start), float(end)

    def show(self, start: float, end: float) -> None:
        self.run("bpipeTimeline.show(arguments[0], arguments[1])", start, end)
        self.settle()

    def place(self, rank: int, side: str, lane: str, time_s: float) -> tuple[float, float]:
        """Scroll to the timeline, and return the position in pixels of the window."""
        self.run("document.getElementById('timeline').scrollIntoView({ block: 'end' })")
        self.run("bpipeTimeline.place(...arguments)", rank, side, lane, time_s)
        self.settle()
        point = self.run("return bpipeTimeline.place(...arguments)", rank, side, lane, time_s)
        return float(point["x"]), float(point["y"])

    def colours(self, x: float, y: float, width: int = 1, height: int = 1) -> list[tuple[int, int, int]]:
        """Return the canvas's pixels around a position."""
        script = """
            const [x, y, width, height] = arguments;
            const plot = document.getElementById("plot");
            const box = plot.getBoundingClientRect();
            const left = Math.floor(x - box.left - (width - 1) / 2);
            const top = Math.floor(y - box.top - (height - 1) / 2);
            return [...plot.getContext("2d").getImageData(left, top, width, height).data];
        """
        data = self.run(script, x, y, width, height)
        return [(data[place], data[place + 1], data[place + 2]) for place in range(0, len(data), 4)]

    def colour(self, x: float, y: float) -> tuple[int, int, int]:
        return self.colours(x, y)[0]

    def shade(self, name: str) -> tuple[int, int, int]:
        """Return one of the page's colours."""
        text = self.run(
            "return getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim()", name
        )
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)

    def picture(self) -> str:
        data_url: str = self.run("return document.getElementById('plot').toDataURL()")
        return data_url

    def hover(self, x: float, y: float) -> str:
        """Return the page's tip at a position; empty if there is none."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        pointer = ActionBuilder(self.driver, duration=0)
        pointer.pointer_action.move_to_location(round(x), round(y))
        pointer.perform()
        return self.tip()

    def tip(self) -> str:
        script = """
            const tip = document.getElementById("tip");
            const facts = [...tip.querySelectorAll("dt")].map((name) => `${name.textContent}: ${name.nextElementSibling.textContent}`);
            return tip.hidden ? "" : [tip.querySelector("strong").textContent, ...facts].join("\\n");
        """
        text: str = self.run(script)
        return text

    def drag(self, start: tuple[float, float], end: tuple[float, float], shift: bool = False) -> None:
        from selenium.webdriver import ActionChains, Keys
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        if shift:
            ActionChains(self.driver).key_down(Keys.SHIFT).perform()
        pointer = ActionBuilder(self.driver, duration=20)
        pointer.pointer_action.move_to_location(round(start[0]), round(start[1])).pointer_down()
        pointer.pointer_action.move_to_location(round(end[0]), round(end[1])).pointer_up()
        pointer.perform()
        if shift:
            ActionChains(self.driver).key_up(Keys.SHIFT).perform()
        self.settle()

    def wheel(self, x: float, y: float, by: int) -> None:
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        ActionChains(self.driver).scroll_from_origin(ScrollOrigin.from_viewport(round(x), round(y)), 0, by).perform()
        self.settle()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        self.run("document.getElementById('plot').focus()")
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()
        self.settle()

    def choose(self, name: str, value: str) -> None:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.select import Select

        Select(self.driver.find_element(By.ID, name)).select_by_value(value)
        self.settle()

    def complaints(self) -> list[Any]:
        """Return the console's messages since the page was opened."""
        logged: list[Any] = self.driver.get_log("browser")
        return logged

    def requests(self) -> list[str]:
        """Return all addresses requested since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    chromium = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip(
            f"no {'chromedriver' if chromium else 'Chromium'} here (Debian: apt-get install chromium chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS, f"--window-size={WIDTH},{HEIGHT}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_script_timeout(30)
    yield driver
    browser_processes = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(profile) in word for word in process.info["cmdline"] or ())
    ]
    driver.quit()
    # The driver does not wait for all of the browser's processes, which would then be left behind. Ended processes may
    # wait long until a container's init collects them.
    deadline = time.monotonic() + 10
    while any(map(_runs, browser_processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
