"""Sends the gatekeeper messages that no honest client sends. Prints a line for each case: its name and the outcome.

    hostile.py CLIENT KEY
"""

import importlib.util
import json
import socket
import ssl
import sys

sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location("client", sys.argv[1])
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)

# The job of each case, which the gatekeeper must not run.
RUN = {"argv": ["touch", "/tmp/was-run"]}


def key():
    return client.Key(sys.argv[2])


def report(case, act):
    try:
        said = act()
    except client.Failure as failure:
        said = "failure: %s" % failure
    except OSError as error:
        said = "closed: %s" % type(error).__name__
    print("%s: %s" % (case, said), flush=True)


def garbage():
    plain = socket.create_connection((key().host, key().port), 5)
    plain.settimeout(15)
    plain.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
    while plain.recv(1000):
        pass
    return "closed"


def silence():
    line = client.Line(key())
    try:
        while True:
            line.receive(15)
    except client.Failure as failure:
        return "says nothing" if "says nothing" in str(failure) else "closed"


def before_proof(kind, payload):
    line = client.Line(key())
    line.receive(5)
    line.send(kind, 0, payload)
    return line.receive(15)


def proof(words):
    line = client.Line(key())
    line.document(client.HELLO)
    line.tell(client.PROOF, words)
    line.document(client.ADMITTED)
    return "let in"


def seen_before():
    """Sends the proof of one connection on another one."""
    sent = []
    line = client.Line(key())
    line.tell = lambda kind, words: sent.append(words)
    line.document = lambda kind: client.Line.document(line, kind) if kind == client.HELLO else {}
    line.introduce(key())
    return proof(sent[0])


def other_certificate():
    """Sends a proof made for another certificate, as a relay between client and gatekeeper would get it."""
    changed = key()
    line = client.Line(changed)
    changed.fingerprint = b"\x07" * 32
    line.introduce(changed)
    return "let in"


def order(words, then=lambda line: None):
    own = key()
    line = client.Line(own)
    line.introduce(own)
    line.send(client.JOB_REQUEST, 0, words if isinstance(words, bytes) else json.dumps(words).encode())
    then(line)
    while True:
        kind, _, payload = line.receive(20)
        if kind == client.REFUSED:
            return "refused: %s" % json.loads(payload.decode())["message"]
        if kind == client.ENDED:
            return "ended: %s" % payload.decode()


def old_tls():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.wrap_socket(socket.create_connection((key().host, key().port), 5))
    return "accepted"


def flood():
    """Opens more connections without a proof than one address may have."""
    many = [socket.create_connection((key().host, key().port), 5) for _ in range(40)]
    closed = 0
    for one in many:
        one.settimeout(0.5)
        try:
            closed += not one.recv(1)
        except socket.timeout:
            pass
        except OSError:
            closed += 1
    return "some closed" if closed >= 20 else "%d closed" % closed


name = key().client
report("garbage", garbage)
report("silence", silence)
report("TLS 1.2", old_tls)
report("order first", lambda: before_proof(client.JOB_REQUEST, json.dumps(RUN).encode()))
report("long proof", lambda: before_proof(client.PROOF, b" " * 2000))
report("no proof", lambda: proof({"tern": 1, "client": name, "proof": ""}))
report("zeros", lambda: proof({"tern": 1, "client": name, "proof": "00" * 32}))
report("other version", lambda: proof({"tern": 2, "client": name, "proof": "00" * 32}))
report("a path", lambda: proof({"tern": 1, "client": "../ternd.toml", "proof": "00" * 32}))
report("the gatekeeper's key", lambda: proof({"tern": 1, "client": "gatekeeper.pem", "proof": "00" * 32}))
report("proof with a user", lambda: proof({"tern": 1, "client": name, "proof": "00" * 32, "user": "root"}))
report("seen before", seen_before)
report("other certificate", other_certificate)
for word, value in [("uid", 0), ("user", "root"), ("gid", 0), ("groups", [0]), ("limits", []), ("nice", -20)]:
    report("a %s" % word, lambda: order(dict(RUN, **{word: value})))
report("no order", lambda: order(b"touch /tmp/was-run"))
report("no words", lambda: order({"argv": []}))
report("a zero byte", lambda: order({"argv": ["touch\0", "/tmp/was-run"]}))
report("a long frame", lambda: order({"argv": ["sleep", "9"]}, lambda line: line.send(client.DATA, 0, b"x" * (2 << 20))))
report("a signal by number", lambda: order({"argv": ["sleep", "9"]}, lambda line: line.send(client.SIGNAL, 0, b"9")))
report(
    "more than the credit",
    lambda: order(
        {"argv": ["sleep", "9"], "input": True},
        lambda line: [line.send(client.DATA, 0, b"x" * 65536) for _ in range(9)],
    ),
)
report("more taken than sent", lambda: order({"argv": ["sleep", "9"]}, lambda line: line.send(client.TAKEN, 1, b"\xff" * 4)))
report("an ask of nodes", lambda: order({"argv": ["sleep", "9"]}, lambda line: line.send(2, 0, b"\1\1")))
report("flood", flood)
