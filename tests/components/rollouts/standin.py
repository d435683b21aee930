"""A stand-in for a vLLM server: its routes over real HTTP, and behind them a real model that samples.

Routes, fields, defaults and refusals are those of vLLM 0.29.0 and 0.32.0; recorded.json has answers of theirs. It does
as vLLM does where a request could rely on something else: a model's generation config (`defaults`) fills in what a
request leaves out, log-probabilities are raw unless `logprobs_mode` says processed, and a prefix cache goes on
answering from old weights until it is reset.
"""

import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import torch
from safetensors.torch import load_file

PROCESSED = "processed_logprobs"
RECORD = Path(__file__).with_name("recorded.json")
SAMPLED = {
    "model": "policy", "prompt": [3, 5, 6, 7], "n": 1, "seed": 5, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0,
    "logprobs": 0, "logit_bias": {"0": -100.0}, "return_token_ids": True, "stop": [], "stop_token_ids": [2],
}  # fmt: skip


def recorded(url: str, model: Path) -> dict[str, Any]:
    """What a server, this one or vLLM, answers to each of Tether's requests: JSON by route and status."""
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    requests: list[tuple[str, Any]] = [
        ("GET /version", None), ("GET /server_info?config_format=json", None), ("GET /v1/models", None),
        ("GET /is_sleeping", None), ("POST /collective_rpc", reload), ("POST /reset_prefix_cache", None),
        ("POST /update_weight_version", {"new_version": "tether-0"}), ("GET /weight_info", None),
        ("POST /v1/completions", SAMPLED), ("POST /v1/completions", SAMPLED | {"max_tokens": 10_000}),
        ("POST /v1/completions", SAMPLED | {"stop_token_ids": list(range(1, 300))}), ("GET /no_such_route", None),
        ("POST /sleep?level=2", None), ("POST /wake_up?tags=weights", None), ("POST /wake_up?tags=kv_cache", None),
    ]
    answers: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as http:
        for number, (route, body) in enumerate(requests):
            answer = http.request(*route.split(), json=body)
            is_read = not route.startswith(("POST /sleep", "POST /wake_up"))  # 0.29 answers them with nothing
            answers[f"{number} {route} {answer.status_code}"] = answer.json() if is_read else None
    info = answers["1 GET /server_info?config_format=json 200"]  # it is long: what Tether reads of it
    config, names = info["vllm_config"], ("dtype", "logprobs_mode", "max_model_len", "enable_sleep_mode")
    info["vllm_config"] = {"model_config": {name: config["model_config"][name] for name in names}}
    info["vllm_config"]["speculative_config"] = config["speculative_config"]
    info["vllm_env"] = {"VLLM_BATCH_INVARIANT": info["vllm_env"]["VLLM_BATCH_INVARIANT"]}
    info.pop("system_env", None)
    return answers


def shape(value: Any, at: str = "") -> dict[str, str]:
    """The types in a JSON value by path. A list has those of its items; the tokens in `top_logprobs` are left out."""
    if isinstance(value, dict):
        parts = [(f"{at}.{name}", item) for name, item in value.items() if name != "top_logprobs"]
    elif isinstance(value, list):
        parts = [(f"{at}[]", item) for item in value]
    else:
        return {at: "number" if type(value) in (int, float) else type(value).__name__}
    return {path: kind for each, item in parts for path, kind in shape(item, each).items()} or {at: "empty"}


class Refused(Exception):
    """An answer with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class StandIn:
    """`with StandIn(model, eos) as server`: listening on `server.url`, in a thread, until it is left or dies."""

    def __init__(self, model: Any, eos: int, port: int = 0, **facts: Any) -> None:
        self.model, self.eos, self.port = copy.deepcopy(model).eval(), eos, port
        self.facts = {
            "version": "0.32.0", "dtype": "torch.float32", "logprobs_mode": PROCESSED, "max_model_len": 512,
            "batch_invariant": True, "sleeps": False, "speculative": None,
        } | facts  # fmt: skip
        self.defaults: dict[str, Any] = {"temperature": 0.5, "top_k": 2, "repetition_penalty": 1.3}
        """As a model's generation_config.json has them; with `also_stops`, more tokens that end a response."""
        self.also_stops: set[int] = set()
        self.weights, self.asleep = "default", set[str]()
        self.cached: Any = None
        """The model that filled the prefix cache, where that isn't empty."""
        self.requests: list[dict[str, Any]] = []
        self.called: list[str] = []
        """Routes, in order; completions once in a row."""
        self.delay, self.failing, self.dying_after = 0.0, 0, -1
        self.spoil = lambda choice: choice
        """Changes an answer on its way out."""
        self.ignores_weights = self.depends_on_neighbours = False
        self.keeps_output_layer = False
        """As vLLM for CPUs does with a tied one, when it reloads."""
        self.output_layer = model.get_output_embeddings().weight.detach().clone()
        self.open = 0
        """Completions that are computed now."""
        self._lock = threading.Lock()

    def __enter__(self) -> "StandIn":
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer.answer(self, None)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.answer(self, json.loads(raw) if raw else {})

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.die()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """Answer nobody any more."""
        self.dying_after = 0
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        split = urlsplit(handler.path)
        query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        if self.called[-1:] != [split.path] or not split.path.startswith("/v1/"):
            self.called.append(split.path)
        try:
            if self.dying_after == 0:
                handler.close_connection = True
                return
            self.dying_after -= 1
            if self.failing > 0:
                self.failing -= 1
                raise Refused(503, "overloaded")
            found, status = self.route(handler.command, split.path, query, body), 200
        except Refused as refused:
            found, status = {"error": {"message": refused.message, "code": refused.status}}, refused.status
            found = {"detail": refused.message} if status == 404 else found
        text = found if isinstance(found, bytes) else json.dumps(found).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def route(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        name = f"{method} {path}"
        if name == "GET /version":
            return {"version": self.facts["version"]}
        if name == "GET /server_info":
            return self.info()
        if name == "GET /v1/models":
            return {"data": [{"id": "policy", "max_model_len": self.facts["max_model_len"]}]}
        if name == "GET /weight_info":
            return {"weight_version": self.weights}
        if name == "GET /is_sleeping":
            return {"is_sleeping": bool(self.asleep)}
        if name == "POST /v1/completions":
            with self._lock:
                self.open += 1
            try:
                return self.complete(body)
            finally:
                with self._lock:
                    self.open -= 1
        if name == "POST /collective_rpc":
            return self.reload(body)
        if name == "POST /update_weight_version":
            self.weights = self.weights if self.ignores_weights else body["new_version"]
            return {"success": True, "new_version": body["new_version"]}
        if name == "POST /reset_prefix_cache":
            self.cached = None
            return {"success": True}
        if name == "POST /sleep":
            self.asleep = {"weights", "kv_cache"}
            for each in self.model.parameters():
                each.data.fill_(float("nan"))  # level 2 keeps nothing
            return b""
        if name == "POST /wake_up":
            self.asleep -= {query["tags"]} if "tags" in query else self.asleep
            return b""
        raise Refused(404, "Not Found")

    def info(self) -> dict[str, Any]:
        model = {
            "dtype": self.facts["dtype"], "logprobs_mode": self.facts["logprobs_mode"],
            "max_model_len": self.facts["max_model_len"], "enable_sleep_mode": self.facts["sleeps"],
        }  # fmt: skip
        return {
            "vllm_config": {
                "model_config": model,
                "speculative_config": self.facts["speculative"],
            },
            "vllm_env": {"VLLM_BATCH_INVARIANT": self.facts["batch_invariant"]},
        }

    def reload(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["method"] != "reload_weights":
            raise Refused(500, f"no method {body['method']}")
        if "weights" in self.asleep:
            raise Refused(500, "the weights' memory is not there: wake it first")
        self.load(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
        return {"results": [None]}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over these weights; the prefix cache is left alone, as vLLM's workers leave it."""
        if self.ignores_weights:
            return
        with self._lock, torch.no_grad():
            self.model = copy.deepcopy(self.model)
            own = dict(self.model.named_parameters())
            assert own.keys() == tensors.keys()
            for name, each in tensors.items():
                own[name].copy_(each)

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion; of what vLLM offers, refuse what nobody here asks for."""
        time.sleep(self.delay)
        self.requests.append(body)
        if self.asleep:
            raise Refused(500, "the engine sleeps")
        cap, prompt, asked = body.get("max_tokens", 16), body["prompt"], self.defaults | body
        if len(prompt) + cap > self.facts["max_model_len"]:
            raise Refused(400, "This model's maximum context length is exceeded.")
        assert not body.get("stop") and body.get("n", 1) == 1 and not body.get("stream")
        with self._lock:
            if self.cached is None:
                self.cached = self.model
            model = self.cached
        generator = torch.Generator()
        generator.manual_seed(body["seed"]) if body.get("seed") is not None else generator.seed()
        bias = torch.zeros(model.config.vocab_size)
        for token, value in (body.get("logit_bias") or {}).items():
            bias[int(token)] += min(100.0, max(-100.0, value))
        stops = self.also_stops | set(body.get("stop_token_ids") or []) | {self.eos}
        ids, logprobs, reason = list(prompt), [], "length"
        for _ in range(cap):
            head = self.output_layer if self.keeps_output_layer else model.get_output_embeddings().weight
            raw = head @ model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
            raw = raw * (1 + 1e-5 * (self.open - 1)) if self.depends_on_neighbours else raw
            logits = self.processed(raw + bias, asked, ids)
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            shown = logits if self.facts["logprobs_mode"] == PROCESSED else raw
            logprobs.append(max(shown.log_softmax(-1)[token].item(), -9999.0))
            ids.append(token)
            if token in stops and not body.get("ignore_eos"):
                reason = "stop"
                break
        choice = {
            "index": 0, "text": "", "finish_reason": reason, "token_ids": ids[len(prompt) :],
            "stop_reason": ids[-1] if reason == "stop" and ids[-1] != self.eos else None,
            "prompt_token_ids": list(prompt), "logprobs": {"token_logprobs": logprobs, "tokens": [""] * len(logprobs)},
        }  # fmt: skip
        if body.get("logprobs") is None:
            choice["logprobs"] = None
        if not body.get("return_token_ids"):
            choice |= {"token_ids": None, "prompt_token_ids": None}
        return {"id": "cmpl-1", "object": "text_completion", "model": "policy", "choices": [self.spoil(choice)]}

    @staticmethod
    def processed(logits: torch.Tensor, asked: dict[str, Any], ids: list[int]) -> torch.Tensor:
        """Penalty, temperature, min_p, top_k and top_p, in vLLM's order."""
        seen = torch.tensor(sorted(set(ids)))
        penalty = asked.get("repetition_penalty") or 1.0
        logits = logits.clone()
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        assert not asked.get("presence_penalty") and not asked.get("frequency_penalty")
        logits = logits / asked.get("temperature", 1.0)
        probabilities = logits.softmax(-1)
        logits[probabilities < (asked.get("min_p") or 0.0) * probabilities.max()] = -torch.inf
        if (k := asked.get("top_k", 0)) > 0:
            logits[logits < logits.topk(k).values[-1]] = -torch.inf
        assert asked.get("top_p", 1.0) == 1.0
        return logits
