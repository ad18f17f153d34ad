"""The KServe v2 protocol: sequences as its clients know them."""

import json

import httpx
import numpy as np
import pytest
import torch

from hiddenstate.serve import Engine
from tests.support.models import Deep, TimeFirst
from tests.support.web import serving

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def oracle():
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture(scope="module")
def http(oracle):
    model = Deep()
    model.load_state_dict(oracle.state_dict())
    with Engine(model) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def asked(x: torch.Tensor, sequence: object, **parameters: object) -> dict:
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
    return {"inputs": [tensor], "parameters": {"sequence_id": sequence, **parameters}}


def test_a_sequence_in_requests_equals_one_call(http, oracle):
    x = torch.randn(1, 6, 3)
    wanted = oracle(x).detach()
    got = []
    for begin in (0, 2, 4):
        body = asked(x[:, begin : begin + 2], 42, sequence_start=begin == 0, sequence_end=begin == 4)
        answer = http.post("/v2/models/any/infer", json={**body, "id": "7"}).json()
        (output,) = answer["outputs"]
        assert (answer["id"], answer["model_name"], output["shape"]) == ("7", "any", [1, 2, 2])
        got.append(torch.tensor(output["data"]).view(output["shape"]))
    torch.testing.assert_close(torch.cat(got, dim=1), wanted, **CLOSE)
    ended = http.post("/v2/models/any/infer", json=asked(x, 42))
    assert ended.status_code == 404
    assert "no session '42'" in ended.json()["error"]


def test_binary_tensors_as_existing_clients_send_them(http, oracle):
    x = np.random.default_rng(0).standard_normal((1, 3, 3)).astype(np.float32)
    tensor = {"name": "x", "shape": [1, 3, 3], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    content = {
        "inputs": [tensor],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        "parameters": {"sequence_id": "b", "sequence_start": True},
    }
    head = json.dumps(content).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "content-type": "application/octet-stream"}
    answer = http.post("/v2/models/m/infer", content=head + x.tobytes(), headers=headers)
    length = int(answer.headers["inference-header-content-length"])
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert output["parameters"]["binary_data_size"] == len(answer.content) - length
    got = np.frombuffer(answer.content[length:], np.float32).reshape(output["shape"])
    torch.testing.assert_close(torch.from_numpy(got.copy()), oracle(torch.from_numpy(x)).detach(), **CLOSE)


def test_a_started_sequence_takes_the_place_of_an_older_one(http, oracle):
    x = torch.randn(1, 2, 3)
    for _ in range(2):
        (output,) = http.post("/v2/models/m/infer", json=asked(x, 9, sequence_start=True)).json()["outputs"]
        got = torch.tensor(output["data"]).view(output["shape"])
        torch.testing.assert_close(got, oracle(x).detach(), **CLOSE)


def test_a_repeated_number_is_answered_again(http):
    http.post("/v2/models/m/infer", json=asked(torch.zeros(1, 1, 3), 3, sequence_start=True))
    answers = [http.post("/v2/models/m/infer", json=asked(torch.ones(1, 3), 3, seq=2)).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["parameters"] == {"sequence_id": 3, "seq": 2}


def test_several_outputs_are_several_tensors():
    with Engine(TimeFirst()) as engine, serving(engine) as url:
        body = asked(torch.zeros(1, 2, 3), 1, sequence_start=True)
        answer = httpx.post(f"{url}/v2/models/m/infer", json=body, trust_env=False).json()
    assert [(out["name"], out["shape"]) for out in answer["outputs"]] == [("y.0", [1, 2, 2]), ("y.1", [1, 2, 4])]


def test_health_and_description(http):
    assert http.get("/v2").json()["name"] == "hiddenstate"
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2/models/m/ready").json() == {"name": "m", "ready": True}
    assert http.get("/v2/models/m").json()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, -1, 3]}]


GOOD = {"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {}}, "sequence_id is needed"),
        ({"parameters": {"sequence_id": 0}}, "sequence_id is needed"),
        ({"parameters": [1]}, "parameters is a JSON object"),
        ({"parameters": {"sequence_id": 5, "seq": "x"}}, "parameters.seq"),
        ({"inputs": []}, "a list of one tensor"),
        ({"inputs": [GOOD, GOOD]}, "a list of one tensor"),
        ({"inputs": [{**GOOD, "datatype": "BYTES"}]}, "a datatype, one of"),
        ({"inputs": [{**GOOD, "shape": [-3]}]}, "a shape, a list of numbers"),
        ({"inputs": [{**GOOD, "shape": [4]}]}, "has 4 numbers, but 3 were given"),
        ({"inputs": [{**GOOD, "shape": [2, 1, 3], "data": [0] * 6}]}, "2 rows, but a sequence is one row"),
        ({"inputs": [{**GOOD, "data": None}]}, "has data"),
        ({"inputs": [{**GOOD, "parameters": {"binary_data_size": 12}}]}, "0 bytes follow"),
    ],
)
def test_nonsense_is_400_in_the_form_of_the_protocol(http, change, message):
    body = {"inputs": [GOOD], "parameters": {"sequence_id": 5, "sequence_start": True}, **change}
    answer = http.post("/v2/models/m/infer", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize("length", [b"99", b"-1", b"1e3", "²".encode("latin-1"), "²".encode(), b"9" * 5000])
def test_a_wrong_length_of_the_header_is_400(http, length):
    answer = http.post("/v2/models/m/infer", content=b"{}", headers={b"inference-header-content-length": length})
    assert answer.status_code == 400
    assert "but the body has 2 bytes" in answer.json()["error"]


@pytest.mark.parametrize("deep", [9, 480, 700, 940])
def test_lists_within_lists_are_400(http, deep):
    body = json.dumps(asked(torch.zeros(3), 5, sequence_start=True))
    nested = "[" * deep + "0" + "]" * deep
    for content in (body.replace("[0.0, 0.0, 0.0]", nested), body.replace('"sequence_start": true', f'"x": {nested}')):
        answer = http.post("/v2/models/m/infer", content=content)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]


def test_the_version_that_is_named_is_there(http, oracle):
    (version,) = http.get("/v2/models/m").json()["versions"]
    assert http.get(f"/v2/models/m/versions/{version}").json() == http.get("/v2/models/m").json()
    assert http.get(f"/v2/models/m/versions/{version}/ready").json() == {"name": "m", "ready": True}
    body = asked(torch.zeros(1, 2, 3), 77, sequence_start=True)
    assert http.post(f"/v2/models/m/versions/{version}/infer", json=body).json()["model_version"] == version
    for method, path in [("GET", ""), ("GET", "/ready"), ("POST", "/infer")]:
        other = http.request(method, f"/v2/models/m/versions/2{path}", json=body if path == "/infer" else None)
        assert other.status_code == 404
        assert "there is no version '2'" in other.json()["error"]


def test_the_outputs_are_described_as_they_come():
    with Engine(TimeFirst()) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as http:
        told = http.get("/v2/models/m").json()["outputs"]
        body = asked(torch.zeros(1, 5, 3), 1, sequence_start=True)
        given = http.post("/v2/models/m/infer", json=body).json()["outputs"]
    assert [(one["name"], one["datatype"]) for one in told] == [(one["name"], one["datatype"]) for one in given]
    assert [[5 if n == -1 else n for n in one["shape"]] for one in told] == [one["shape"] for one in given]
