"""The REST routes: sessions as resources."""

from urllib.parse import quote

import httpx
import pytest
import safetensors.torch
import torch

import hiddenstate as hs
from hiddenstate.serve import Engine
from tests.support.models import TimeFirst
from tests.support.web import serving

BINARY = {"content-type": "application/octet-stream"}


def binary(x: torch.Tensor) -> bytes:
    return safetensors.torch.save({"x": x})


def test_a_session_over_rest_equals_one_call(http, model):
    x = torch.randn(7, 3)
    with torch.no_grad():
        wanted = model(x.unsqueeze(0))[0]
    opened = http.post("/v1/sessions", json={"id": "a"})
    assert opened.status_code == 201
    assert opened.json()["id"] == "a"
    first = http.post("/v1/sessions/a/steps", json={"x": x[0].tolist(), "seq": 1})
    assert first.json()["seq"] == 1
    second = http.post("/v1/sessions/a/steps", content=binary(x[1:4]), headers=BINARY)
    assert second.headers["x-seq"] == "2"
    third = http.post("/v1/sessions/a/steps?seq=3", json={"x": x[4:].tolist()})
    got = [
        torch.tensor([first.json()["y"]]),
        safetensors.torch.load(second.content)["y"],
        torch.tensor(third.json()["y"]),
    ]
    torch.testing.assert_close(torch.cat(got), wanted, rtol=1e-5, atol=1e-6)
    again = http.post("/v1/sessions/a/steps?seq=3", json={"x": [0, 0, 0]})
    assert again.json() == third.json()
    facts = http.get("/v1/sessions/a").json()
    assert (facts["seq"], facts["steps"], facts["hot"]) == (3, 7, True)


def test_sessions_are_resources(http):
    name = http.post("/v1/sessions").json()["id"]
    assert len(name) == 32
    assert http.put("/v1/sessions/b").status_code == 201
    assert http.put("/v1/sessions/b").json()["error"]["kind"] == "SessionExists"
    assert http.put("/v1/sessions/b?exist_ok=true").status_code == 201
    assert http.get("/v1/sessions").json() == {"sessions": sorted([name, "b"])}
    http.post("/v1/sessions/b/steps", json={"x": [1, 2, 3]})
    forked = http.post("/v1/sessions/b/fork", json={"id": "c"})
    assert (forked.status_code, forked.json()["seq"]) == (201, 1)
    assert len(http.post("/v1/sessions/b/fork").json()["id"]) == 32
    assert http.post("/v1/sessions/b/reset").status_code == 204
    assert http.delete("/v1/sessions/b").status_code == 204
    assert http.get("/v1/sessions/b").status_code == 404
    assert http.get("/v1/sessions?prefix=c&limit=1").json() == {"sessions": ["c"]}


def test_a_state_is_downloaded_and_put_back(http, tmp_path):
    x = torch.randn(3)
    http.put("/v1/sessions/a")
    http.post("/v1/sessions/a/steps", content=binary(x), headers=BINARY)
    state = http.get("/v1/sessions/a/state")
    assert state.headers["content-type"] == "application/octet-stream"
    (tmp_path / "state").write_bytes(state.content)
    assert hs.load(tmp_path / "state").batch == 1
    put = http.put("/v1/sessions/b/state", content=state.content)
    assert (put.status_code, put.json()["seq"]) == (200, 1)
    answers = [http.post(f"/v1/sessions/{name}/steps", json={"x": [1, 2, 3]}).json() for name in "ab"]
    assert answers[0] == answers[1]
    shown = http.get("/v1/sessions/a/state", headers={"accept": "application/json"}).json()
    assert sorted(shown["parts"]) == ["encoder.lstm.c", "encoder.lstm.h", "gru.h"]
    assert http.put("/v1/sessions/b/state", content=b"\x80nonsense").status_code == 400


def test_an_unknown_session_is_404_unless_it_may_be_begun(http):
    lost = http.post("/v1/sessions/nobody/steps", json={"x": [1, 2, 3]})
    assert lost.status_code == 404
    assert lost.json()["error"]["kind"] == "SessionLost"
    assert lost.json()["error"]["reason"] == "unknown"
    assert http.post("/v1/sessions/nobody/steps?open=true", json={"x": [1, 2, 3]}).json()["seq"] == 1
    assert http.post("/v1/sessions/nobody/steps?open=true", json={"x": [1, 2, 3]}).json()["seq"] == 2


def test_a_gap_is_409_and_says_how_far_the_session_is(http):
    http.put("/v1/sessions/a")
    gap = http.post("/v1/sessions/a/steps", json={"x": [1, 2, 3], "seq": 5})
    assert gap.status_code == 409
    assert gap.json()["error"]["seq"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[1, 2]", "a JSON object with"),
        (b'{"x": "abc"}', "not made of numbers"),
        (b'{"x": [[1, 2, 3], [1]]}', "cannot be made a tensor"),
        (b'{"x": [1, 2]}', "one step of this model has (3,)"),
        (b'{"x": []}', "one step of this model has (3,)"),
        (b'{"x": [1, 2, true]}', "not made of numbers"),
        (b'{"x": [1, 2, 3], "seq": 0}', "numbered from 1"),
        (b'{"x": [1, 2, 3], "seq": "1"}', "numbered from 1"),
        (b'{"x": [1, 2, 1' + b"0" * 400 + b"]}", "number is infinity"),
        (b'{"x": [1, 2, NaN]}', "no JSON"),
        *((b'{"x": ' + b"[" * deep + b"1" + b"]" * deep + b"}", "more than 2 lists") for deep in (4, 480, 700, 940)),
        (b"[" * 940 + b"]" * 940, "a JSON object with"),
    ],
)
def test_nonsense_is_400_with_a_reason(http, body, message):
    http.put("/v1/sessions/a?exist_ok=true")
    answer = http.post("/v1/sessions/a/steps", content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no safetensors"),
        (b"\x80\x04nonsense", "no safetensors"),
        (safetensors.torch.save({"z": torch.zeros(3)}), "one tensor named 'x'"),
        (binary(torch.zeros(3, dtype=torch.complex64)), "cast would lose"),
    ],
)
def test_binary_nonsense_is_400_with_a_reason(http, body, message):
    http.put("/v1/sessions/a?exist_ok=true")
    answer = http.post("/v1/sessions/a/steps", content=body, headers=BINARY)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_nan_is_422_and_the_session_goes_on(http):
    http.put("/v1/sessions/a")
    failed = http.post("/v1/sessions/a/steps", content=binary(torch.full((3,), torch.nan)), headers=BINARY)
    assert failed.status_code == 422
    assert failed.json()["error"]["kind"] == "ModelFailed"
    assert http.post("/v1/sessions/a/steps", json={"x": [1, 2, 3], "seq": 1}).status_code == 200


def test_several_outputs_are_named_by_their_place():
    with Engine(TimeFirst()) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as http:
        http.put("/v1/sessions/a")
        answer = http.post("/v1/sessions/a/steps", content=binary(torch.zeros(2, 3)), headers=BINARY)
        assert {name: t.shape for name, t in safetensors.torch.load(answer.content).items()} == {
            "y.0": (2, 2),
            "y.1": (2, 4),
        }
        assert len(http.post("/v1/sessions/a/steps", json={"x": [[0, 0, 0]]}).json()["y"]) == 2


def test_a_session_may_have_any_printable_name(http):
    names = ["a/b", "a", "a%2Fb", "/", "ä ö", "50%", "a?b#c", "x/steps"]
    for name in names:
        path = f"/v1/sessions/{quote(name, safe='')}"
        assert http.put(path).json()["id"] == name
        assert http.post(f"{path}/steps", json={"x": [1, 2, 3]}).json()["seq"] == 1
        assert http.get(path).json()["seq"] == 1
        assert http.get(f"{path}/state").status_code == 200
    assert http.get("/v1/sessions").json()["sessions"] == sorted(names)
    for name in names:
        assert http.delete(f"/v1/sessions/{quote(name, safe='')}").status_code == 204


@pytest.mark.parametrize("sent", ["%ff", "%fe", "a%c3", "a%00b", "%0a", "%2E%2E", "x" * 257])
def test_bytes_that_are_no_name_are_refused(http, sent):
    for method, path in [("PUT", ""), ("GET", ""), ("POST", "/steps")]:
        answer = http.request(method, f"/v1/sessions/{sent}{path}", json={"x": [1, 2, 3]} if path else None)
        assert answer.status_code == 400, (method, answer.text)
        assert answer.json()["error"]["kind"] == "BadInput"


def test_a_large_output_is_written_in_pieces_that_make_a_whole(http):
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(3, 700, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

    with Engine(Wide()) as engine, serving(engine) as url, httpx.Client(base_url=url, trust_env=False) as client:
        client.put("/v1/sessions/a")
        x = torch.randn(200, 3)
        got = client.post("/v1/sessions/a/steps", json={"x": x.tolist()}, timeout=30).json()["y"]
        client.put("/v1/sessions/b")
        raw = client.post("/v1/sessions/b/steps", content=binary(x), headers=BINARY, timeout=30)
    torch.testing.assert_close(torch.tensor(got), safetensors.torch.load(raw.content)["y"])
