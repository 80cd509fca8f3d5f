"""REST, core (section 1)."""

import base64
import json
import re
import shutil
import time

import pytest
from harness import LIMIT, at_once, wait_until, write_model

from acceptance.digits import image

TAILS = """
def handle(data, context):
    if data is None:
        return None
    return [context.get_request_header(i, "url_path") for i in range(len(data))]
"""
HELLO = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    for _ in range(3):
        parts = ["hello"] * len(data)
        send_intermediate_predict_response(parts, context.request_ids, "part", 200, context)
    return ["hello world "] * len(data)
"""
COROUTINE = """
import asyncio

class Coroutine:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        number = int(bytes(data[0]["body"]))
        await asyncio.sleep(0.01 * (10 - number))
        return [str(number)]
"""
NOT_ACCEPTED = """
def handle(data, context):
    return data and ["Not Accepted"] * len(data)
"""
SLOW_LOAD = """
import time

class Slow:
    def initialize(self, context):
        time.sleep(3)

    def handle(self, data, context):
        return ["loaded"] * len(data)
"""
SLOW_ONCE = """
import time

class SlowOnce:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        print("printed by the handler", flush=True)
        if bytes(data[0]["body"]) == b"slow":
            time.sleep(60)
        return ["quick"] * len(data)
"""
BROKEN = """
class Broken:
    def initialize(self, context):
        self.step()

    def step(self):
        raise RuntimeError("cannot be initialised")

    def handle(self, data, context):
        return data
"""


@pytest.fixture
def mnist(server, digits):
    """The model of digits on the shared server, anew for each test."""
    shutil.copy(digits, server.store / "mnist.mar")
    answer = server.register("mnist.mar")
    assert answer.status_code == 200, answer.text
    yield "mnist"
    server.manage("DELETE", "/models/mnist")


def test_what_follows_the_version_reaches_the_handler(server):
    """test_url_path: each request of a batch has its own tail."""
    server.serve("tails", TAILS, config="batchSize: 2\nmaxBatchDelay: 2000\nbatchGather: strict\n")
    path = "/predictions/tails/1.0/v1/chat/completion"
    assert server.infer(path, method="GET").text == "v1/chat/completion"
    tails = ["v1/chat", "v1/models"]
    answers = at_once(
        [lambda tail=tail: server.infer(f"/predictions/tails/1.0/{tail}", b"x") for tail in tails]
    )
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, t) for t in tails]


def test_a_configuration_may_be_indented(server, digits, tmp_path):
    """test_mnist_template: an indented model-config.yaml; a list of one number is sent bare."""
    shutil.unpack_archive(digits, server.store / "template", "zip")
    manifest = server.store / "template/MAR-INF/MANIFEST.json"
    entry = json.loads(manifest.read_text())
    entry["model"]["configFile"] = "model-config.yaml"
    manifest.write_text(json.dumps(entry))
    config = "    minWorkers: 1\n    batchSize: 1\n    maxWorkers: 1\n"
    (server.store / "template/model-config.yaml").write_text(config)
    assert server.register("template", model_name="template").status_code == 200
    described = server.describe("template")
    assert (described["minWorkers"], described["maxWorkers"], described["batchSize"]) == (1, 1, 1)
    answer = server.predict("template", image(0))
    assert (answer.status_code, answer.text) == (200, "0")


def test_coroutines_answer_each_request_with_its_own(server):
    """test_async_worker_comm: ten at once, in any order."""
    server.serve("coroutine", COROUTINE, config="asyncCommunication: true\n")
    answers = at_once([lambda n=n: server.predict("coroutine", str(n)) for n in range(10)])
    assert [answer.text for answer in answers] == [str(n) for n in range(10)]


def test_a_registration_comes_before_the_archive(server):
    """test_model_config: the batch size of the archive, unless the query has one."""
    write_model(server.store, "sized", NOT_ACCEPTED, config="batchSize: 4\nmaxBatchDelay: 200\n")
    assert server.register("sized", model_name="archived").status_code == 200
    assert server.register("sized", model_name="asked", batch_size=2).status_code == 200
    sizes = [
        server.manage("GET", f"/models/{name}/1.0").json()[0]["batchSize"]
        for name in ("archived", "asked")
    ]
    assert sizes == [4, 2]


def test_intermediate_replies_are_chunks(server):
    """test_send_intermediate_prediction_response: three and the last, each as it is made."""
    server.serve("hello", HELLO)
    answer = server.predict("hello", b"x", stream=True)
    assert answer.status_code == 200
    assert answer.headers["Transfer-Encoding"] == "chunked"
    raw = server.raw(
        b"POST /predictions/hello HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n"
        b"connection: close\r\n\r\nx"
    )
    chunks = re.findall(rb"\r\n[0-9a-fA-F]+\r\n(hello[^\r]*)(?=\r\n)", raw)
    assert chunks == [b"hello", b"hello", b"hello", b"hello world "]
    assert answer.content == b"".join(chunks)


def test_invoking_a_model_that_is_not_there_is_404(server):
    """test_sm_mme_requirements: `/models/{m}/invoke` on the inference port."""
    answer = server.infer("/models/absent/invoke", b"x")
    assert (answer.status_code, answer.json()["code"]) == (404, 404)


def test_an_upload_is_classified(server, mnist):
    """test_handler: the field `data` of a form."""
    for digit in (1, 7):
        files = {"data": ("digit.png", image(digit), "image/png")}
        answer = server.infer("/predictions/mnist", files=files)
        assert (answer.status_code, answer.text) == (200, str(digit))


def test_a_handler_that_is_not_there_fails_its_registration(server, mnist):
    """test_handler: `handler=` without such a file, with a worker."""
    answer = server.register("mnist.mar", model_name="without", handler="nehandlermodels")
    body = answer.json()
    assert (answer.status_code, body["code"]) == (500, 500)
    assert body["type"] == "InternalServerException"
    assert "without" not in server.models()


def test_a_model_whose_handler_is_not_there_answers_an_error(server, mnist):
    """test_handler: with no workers it registers, and scaling it without waiting is accepted."""
    answer = server.register(
        "mnist.mar", model_name="none", handler="nehandlermodels", initial_workers=0
    )
    assert answer.status_code == 200
    assert server.manage("PUT", "/models/none?min_worker=2").status_code == 202
    wait_until("two are listed", lambda: len(server.describe("none")["workers"]) > 1)
    answer = server.infer("/predictions/none", files={"data": image(1)})
    assert answer.status_code >= 500
    assert answer.text != "1"
    assert server.manage("DELETE", "/models/none").status_code == 200


def test_an_explanation_has_the_shape_of_its_image(server, mnist):
    """test_handler: `/explanations/mnist`."""
    answer = server.infer("/explanations/mnist", files={"data": image(2)})
    assert answer.status_code == 200, answer.text
    (channel,) = answer.json()
    assert (len(channel), {len(row) for row in channel}) == (28, {28})


def test_kserves_first_envelope(start, digits):
    """test_handler: `service_envelope=kserve`, predictions and explanations."""
    server = start(["service_envelope=kserve"])
    shutil.copy(digits, server.store)
    assert server.register("mnist.mar").status_code == 200
    body = {"instances": [{"data": base64.b64encode(image(2)).decode()}]}
    assert server.infer("/v1/models/mnist:predict", json.dumps(body)).json() == {"predictions": [2]}
    explained = server.infer("/v1/models/mnist:explain", json.dumps(body)).json()
    assert list(explained) == ["explanations"]
    ((channel,),) = explained["explanations"]
    assert (len(channel), {len(row) for row in channel}) == (28, {28})


def test_uploads_by_put_form_a_batch(server):
    """test_handler: two `curl -T` at once, with a batch of two and a long delay."""
    server.serve(
        "text", NOT_ACCEPTED, config="batchSize: 2\nmaxBatchDelay: 10000\nbatchGather: strict\n"
    )
    begun = time.monotonic()
    answers = at_once([lambda: server.predict("text", b"some text", method="PUT")] * 2)
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "Not Accepted")] * 2
    assert time.monotonic() - begun < 8, "a full batch does not wait"


def test_each_listener_describes_its_api(start, scheme):
    """postman/https: `OPTIONS /` on each of them, and a model's whole life."""
    server = start.make()
    if scheme == "https":
        server.speak_tls()
    server.start()
    for listener in (server.inference, server.management, server.metrics_api):
        assert listener.startswith(f"{scheme}://")
        answer = server.session.options(f"{listener}/", timeout=LIMIT)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        described = answer.json()
        assert (described["openapi"], described["info"]["title"]) == ("3.0.1", "TorchServe APIs")
        assert described["paths"]
    server.serve("text", NOT_ACCEPTED)
    assert server.describe("text")["modelName"] == "text"
    scaled = server.manage("PUT", "/models/text?min_worker=2&synchronous=true")
    assert scaled.status_code == 200
    assert server.predict("text", b"some text").text == "Not Accepted"
    assert server.manage("DELETE", "/models/text").status_code == 200


def test_the_list_may_have_a_slash_at_its_end(server):
    """test_url: `GET /models/` is `GET /models`."""
    with_slash, without = server.manage("GET", "/models/"), server.manage("GET", "/models")
    assert with_slash.status_code == 200
    assert with_slash.content == without.content


def test_loading_has_a_limit_of_its_own(server):
    """test_startup_timeout: `startupTimeout` rules the load, `responseTimeout` does not."""
    config = "startupTimeout: 30\nresponseTimeout: 1\n"
    write_model(server.store, "patient", SLOW_LOAD, config=config)
    begun = time.monotonic()
    assert server.register("patient", synchronous="false").status_code == 202
    server.wait_for_workers("patient")
    assert 3 <= time.monotonic() - begun < 20
    assert server.describe("patient")["workers"][0]["status"] == "READY"
    assert server.predict("patient", b"x").text == "loaded"


def test_a_load_over_its_limit_is_told_in_torchserves_words(server):
    """test_startup_timeout: the two lines that people's alerts look for."""
    write_model(server.store, "hasty", SLOW_LOAD, config="startupTimeout: 1\n")
    assert server.register("hasty", synchronous="false").status_code == 202
    output = server.wait_for_output("Backend worker did not respond in given time")
    lines = output.splitlines()
    place = next(i for i, line in enumerate(lines) if "Backend worker error" in line)
    expected = (
        "org.pytorch.serve.wlm.WorkerInitializationException: "
        "Backend worker did not respond in given time"
    )
    assert expected in lines[place + 1]
    server.manage("DELETE", "/models/hasty")


def test_a_worker_recovers_from_a_request_over_its_limit(start):
    """test_auto_recover: 500, and the story of it on the output."""
    server = start(["default_response_timeout=2"])
    server.serve("slow", SLOW_ONCE)
    answer = server.predict("slow", b"slow")
    assert (answer.status_code, answer.json()["code"]) == (500, 500)
    wait_until("it answers again", lambda: server.predict("slow", b"x").status_code == 200)
    output = server.wait_for_output("Auto recovery succeeded, reset recoveryStartTS")
    for phrase in (
        "Number or consecutive unsuccessful inference 1",
        "Worker disconnected",
        "Retry worker",
        "Auto recovery start timestamp",
        "printed by the handler",
    ):
        assert phrase in output, phrase
    assert "Auto recovery failed again" not in output


def test_each_try_to_load_tells_its_traceback(server):
    """test_handler_traceback_logging: the first try and three more, line by line."""
    write_model(server.store, "broken", BROKEN, config="maxRetryTimeoutInSec: 300\n")
    assert server.register("broken", synchronous="false").status_code == 202
    line = BROKEN.splitlines().index("        self.step()") + 1
    frame = re.compile(rf'MODEL_LOG - .*handler\.py", line {line}, in initialize')
    error = re.compile(r"MODEL_LOG - RuntimeError: cannot be initialised")

    def told():
        output = server.output
        return min(len(frame.findall(output)), len(error.findall(output))) >= 4

    wait_until("four tracebacks", told, limit=60)
    server.manage("DELETE", "/models/broken")
