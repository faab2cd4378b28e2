"""The page at `/` in the system's Chromium; skipped where there is none (`make test-browser` says how to get it)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import Served, serving, tiny_engine

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install -y chromium"),
    pytest.mark.xdist_group("browser"),
]
SETTINGS = {"max-tokens": "24", "seed": "5", "temperature": "1", "force": "true"}
AS_OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "seed": 5, "do_sample": True, "temperature": 1.0, "top_k": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serving(tiny_engine(tmp_path_factory.mktemp("profile"), max_position_embeddings=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, served) -> Iterator[Any]:
    """The page with drafts forced, at the width of a phone; fails a test for errors and for requests elsewhere."""
    context = browser.new_context(viewport={"width": 360, "height": 740})
    for name, value in SETTINGS.items():
        context.add_init_script(f"sessionStorage.setItem('selfspec-{name}', '{value}')")
    opened, faults = context.new_page(), []
    opened.set_default_timeout(20_000)
    opened.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: faults.append(request.url) if not _is_allowed(request, served) else None)
    opened.goto(served.address)
    sync_api.expect(opened.locator("#model")).to_have_text(served.engine.name)
    yield opened
    assert not faults
    context.close()


def _is_allowed(request: Any, served: Served) -> bool:
    return request.url.startswith((f"{served.address}/", "data:,"))


def send(page: Any, text: str, button: str = "#send") -> None:
    page.fill("#input", text)
    page.click(button)
    sync_api.expect(page.locator("#stop")).to_be_hidden()


def answers(page: Any) -> list[str]:
    return page.locator(".text").all_text_contents()


def test_a_message_streams_and_its_drafted_tokens_are_marked(page, served):
    send(page, "hi there")
    first = served.engine.complete([{"role": "user", "content": "hi there"}], **AS_OPTIONS).text
    assert answers(page) == [first]
    drafted = page.locator(".text [data-origin=drafted]")
    assert drafted.count() > 0
    style = "element => [getComputedStyle(element).textDecorationLine, getComputedStyle(element).color]"
    (line, colour), (_, other) = drafted.first.evaluate(style), page.locator(".text").evaluate(style)
    assert line == "underline" and colour != other
    assert re.search(r"24 tokens, .* tokens/s, .* tokens per step, .*% drafted, seed 5", page.inner_text(".about"))
    assert float(page.inner_text("#length")) > 1 and page.locator("#length-plot rect").count() > 2
    assert page.locator("#speed-plot polyline").get_attribute("points") and page.inner_text("#speed") != "–"
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360

    page.fill("#input", "and then?")  # a second turn, by keyboard, with the first in its prompt
    page.press("#input", "Enter")
    sync_api.expect(page.locator(".about")).to_have_count(2)
    sync_api.expect(page.locator("#stop")).to_be_hidden()
    turns = [("user", "hi there"), ("assistant", first), ("user", "and then?")]
    chat = [{"role": role, "content": text} for role, text in turns]
    assert answers(page)[1] == served.engine.complete(chat, **AS_OPTIONS).text
    page.click("#new")
    assert not answers(page) and page.is_visible("#start")


def test_the_switch_turns_drafting_off(page):
    page.click("#speculation")
    send(page, "hi there")
    assert page.locator(".text [data-origin]").count() > 0
    assert page.locator(".text [data-origin=drafted]").count() == 0
    assert "plain (request)" in page.inner_text(".about")
    page.click("#more")
    assert "plain (request)" in page.inner_text("#plans")


def test_the_comparison_shows_equal_texts_and_both_speeds(page):
    send(page, "hi there", "#compare")
    drafted, plain = answers(page)
    assert drafted == plain and "The two texts are equal." in page.inner_text(".verdict")
    summaries = page.locator(".pair .about").all_text_contents()
    assert "% drafted" in summaries[0] and "plain (request)" in summaries[1]
    assert all("tokens/s" in summary for summary in summaries)


def answer_with(page: Any, *texts: str) -> None:
    """Answers the page's next requests with these texts instead of the model's."""
    left = list(texts)

    def fulfil(route: Any) -> None:
        text = left.pop(0)
        info = {"tokens": [[text, "drafted"]], "accepted_lengths": [1], "plan": "chain:1", "off_reason": None}
        choice = {"index": 0, "delta": {"content": text}, "draft_info": {**info, "elapsed_s": 0.1}}
        event = json.dumps({"choices": [choice]})
        route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", fulfil)


def test_text_of_the_model_and_of_the_user_is_never_markup(page):
    markup = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"><b>bold</b>"
    answer_with(page, markup)
    send(page, markup)
    assert answers(page) == [markup] and page.locator(".user p").text_content() == markup
    assert page.locator("#log :is(script, img, b)").count() == 0 and page.title() == "selfspec"


def test_the_comparison_names_the_first_difference(page):
    answer_with(page, "the sky is blue", "the sky is red")
    send(page, "hi there", "#compare")
    verdict = page.inner_text(".verdict")
    assert "differ from character 12" in verdict and '"the sky is blue"' in verdict and '"the sky is red"' in verdict


def test_stop_ends_an_answer_and_keeps_its_text(page, served):
    page.click("#open-settings")
    page.fill("#max-tokens", "")
    page.keyboard.press("Escape")
    page.fill("#input", "hi there")
    page.click("#send")
    sync_api.expect(page.locator(".text span").first).to_be_visible()
    page.click("#stop")
    sync_api.expect(page.locator(".about")).to_contain_text("Stopped")
    assert answers(page)[0] and page.evaluate("() => messages.length") == 2


def test_a_model_without_a_chat_template_continues_the_text(page, served, monkeypatch):
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", None)
    page.reload()
    sync_api.expect(page.locator("#input")).to_have_attribute("placeholder", "Text to continue")
    send(page, "abc")
    assert answers(page) == [served.engine.complete("abc", **AS_OPTIONS).text]


def test_the_page_asks_for_the_key_that_the_server_wants(browser, served):
    with serving(served.engine, api_key="secret") as locked:
        context = browser.new_context(color_scheme="dark")
        page = context.new_page()
        page.goto(locked.address)
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#model")).to_have_text(locked.engine.name)
        assert page.evaluate("() => sessionStorage.getItem('selfspec-key')") == "secret"
        context.close()


def test_the_theme_follows_the_system_until_it_is_chosen(browser, served):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    ground = "() => getComputedStyle(document.body.parentElement).backgroundColor"
    page.goto(served.address)
    dark = page.evaluate(ground)
    page.click("#open-settings")
    page.select_option("#theme", "light")
    light = page.evaluate(ground)
    page.reload()
    assert page.evaluate(ground) == light != dark
    context.close()


def test_the_policy_of_the_page_names_no_host(served):
    policy = served.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
