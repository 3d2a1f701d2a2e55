"""A server that speaks Triton's HTTP protocol for one model made of arithmetic.

The model's vocabulary has VOCAB ids. At every position it favours the next id, (id + 1) % VOCAB,
with logit 2 against 0; so greedy generation counts upwards. It is asked over real sockets.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from launcher_scripts.clients.connection import NUMPY_TYPES

VOCAB = 11
FAVOUR = 2.0


def logits_after(ids):
    """float32 [len(ids), VOCAB]"""
    logits = np.zeros((len(ids), VOCAB), np.float32)
    logits[np.arange(len(ids)), (np.asarray(ids) + 1) % VOCAB] = FAVOUR
    return logits


def answer(tensors):
    """The model: input tensors to output tensors, all rows at once."""
    lengths = tensors["input_lengths"][:, 0]
    wanted = tensors["request_output_len"][:, 0]
    batch, total = len(lengths), int((lengths + wanted).max())
    output_ids = np.zeros((batch, 1, total), np.uint32)
    context_logits = np.zeros((batch, int(lengths.max()), VOCAB), np.float32)
    for index, (length, more) in enumerate(zip(lengths, wanted, strict=True)):
        ids = [int(token) for token in tensors["input_ids"][index, :length]]
        context_logits[index, :length] = logits_after(ids)
        for _ in range(more):
            ids.append((ids[-1] + 1) % VOCAB)
        output_ids[index, 0, : len(ids)] = ids
    log_p = FAVOUR - np.log(np.exp(FAVOUR) + VOCAB - 1)
    return {
        "output_ids": ("UINT32", output_ids),
        "sequence_length": ("UINT32", (lengths + wanted).astype(np.uint32)[:, None]),
        "response_input_lengths": ("INT32", lengths.astype(np.int32)[:, None]),
        "cum_log_probs": ("FP32", (wanted * log_p).astype(np.float32)[:, None]),
        "output_log_probs": ("FP32", np.full((batch, 1, int(wanted.max())), log_p, np.float32)),
        "context_logits": ("FP32", context_logits),
    }


class FakeServer:
    """Serves model `counting` until closed.

    refuse:   a message with which every inference is refused
    hang_up:  answer so many inferences, then close every connection without an answer
    received: the input tensors of every inference, in order of arrival
    """

    def __init__(self, *, refuse=None, hang_up=None, max_batch_size=4, ready_after=0, delay=0.0):
        self.refuse, self.hang_up, self.max_batch_size = refuse, hang_up, max_batch_size
        self.ready_after, self.delay = ready_after, delay
        self.received = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.http.server_port}"

    def close(self):
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def reply(self, status, body, headers=()):
            self.send_response(status)
            for name, value in (*headers, ("Content-Length", len(body))):
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            if self.path == "/v2/models/counting/config":
                config = {
                    "name": "counting",
                    "backend": "fastertransformer",
                    "max_batch_size": server.max_batch_size,
                }
                self.reply(200, json.dumps(config).encode())
            elif self.path in ("/v2/health/ready", "/v2/models/counting/ready"):
                with server.lock:
                    server.ready_after -= 1
                    ready = server.ready_after < 0
                self.reply(200 if ready else 400, b"")
            else:
                self.reply(404, b'{"error": "no such model"}')

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v2/repository/index":
                self.reply(200, json.dumps([{"name": "counting", "state": "READY"}]).encode())
                return
            tensors, wanted = _parse(body, int(self.headers["Inference-Header-Content-Length"]))
            with server.lock:
                server.received.append(tensors)
                gone = server.hang_up is not None and len(server.received) > server.hang_up
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
            stopped = server.delay and server.stopping.wait(server.delay)
            with server.lock:
                server.in_flight -= 1
            if gone or stopped:
                self.close_connection = True
            elif server.refuse:
                self.reply(400, json.dumps({"error": server.refuse}).encode())
            else:
                head, data = _encode(answer(tensors), wanted)
                length = [("Inference-Header-Content-Length", len(head))]
                self.reply(200, head + data, length)

    return Handler


def _parse(body, head_length):
    head = json.loads(body[:head_length])
    tensors, position = {}, head_length
    for tensor in head["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        data = np.frombuffer(body[position : position + size], NUMPY_TYPES[tensor["datatype"]])
        tensors[tensor["name"]] = data.reshape(tensor["shape"])
        position += size
    return tensors, [output["name"] for output in head.get("outputs", [])]


def _encode(outputs, requested):
    described, data = [], b""
    for name in requested or outputs:
        datatype, array = outputs[name]
        raw = array.tobytes()
        described.append(
            {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(raw)},
            }
        )
        data += raw
    head = {"model_name": "counting", "model_version": "1", "outputs": described}
    return json.dumps(head).encode(), data
