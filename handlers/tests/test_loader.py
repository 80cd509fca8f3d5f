"""From the spelling of a handler to something to call."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import item

from ts._runtime import bridge

FUNCTION = "def {name}(data, context):\n    return data and ['{mark}'] * len(data)\n"
CLASS = """
class {name}:
    def initialize(self, context): self.mark = '{mark}'
    def handle(self, data, context): return [self.mark] * len(data)
"""


def function(name="handle", mark="own"):
    return FUNCTION.format(name=name, mark=mark)


def class_(name="Handler", mark="own"):
    return CLASS.format(name=name, mark=mark)


@pytest.mark.parametrize(
    ("handler", "files"),
    [
        ("h.py", {"h.py": function()}),
        ("h", {"h.py": function()}),
        ("some/where/h.py", {"h.py": function()}),
        ("h.py:handle", {"h.py": function()}),
        ("h:answer", {"h.py": function("answer")}),
        ("h.py:answer", {"h.py": function("answer") + class_("A") + class_("B")}),
        ("h.py", {"h.py": class_()}),
        ("h.py:handle", {"h.py": class_()}),
        ("h.py:Chosen", {"h.py": class_("Other", "wrong") + class_("Chosen")}),
        # Imported classes do not count, nor does a second name for the same one.
        (
            "h.py",
            {"h.py": "from collections import OrderedDict\n" + class_() + "Alias = Handler\n"},
        ),
        ("pkg.mod", {"pkg/__init__.py": "", "pkg/mod.py": function()}),
        ("pkg.mod.handle", {"pkg/__init__.py": "", "pkg/mod.py": function()}),
        ("pkg.mod.answer", {"pkg/__init__.py": "", "pkg/mod.py": function("answer")}),
        ("pkg.mod:answer", {"pkg/__init__.py": "", "pkg/mod.py": function("answer")}),
        # Names that other modules have too.
        ("json.py", {"json.py": function()}),
        ("random.py", {"random.py": class_()}),
        ("ts.py", {"ts.py": class_()}),
        ("service.py", {"service.py": function()}),
        ("context.py", {"context.py": class_()}),
        ("bridge.py:handle", {"bridge.py": function()}),
        ("wave.py", {"wave.py": function()}),
        # Files of the archive are imported by their names.
        ("h.py", {"h.py": "from utils import handle\n", "utils.py": function()}),
        ("h.py", {"h.py": "from pkg.deep import handle\n", "pkg/deep.py": function()}),
    ],
)
def test_accepted_spellings(load, handler, files):
    session = load(files, handler)
    kind, _, message, replies, _ = session.run([item()])
    assert (kind, message) == ("ok", "")
    assert replies == [(200, "", [], b"own")]


@pytest.mark.parametrize(
    ("handler", "files", "text"),
    [
        ("missing.py", {}, "no handler module `missing`"),
        ("invalidHandler", {}, "no handler module `invalidHandler`"),
        ("", {}, "names no module"),
        (".py", {}, "names no module"),
        ("no..such", {}, "no handler module"),
        ("h.py", {"h.py": "def handle(:\n"}, "SyntaxError"),
        ("h.py", {"h.py": "import nonexistent_package\n"}, "nonexistent_package"),
        ("h.py", {"h.py": "from json import nonexistent\n"}, "nonexistent"),
        ("h.py", {"h.py": class_("A") + class_("B")}, "defines `A`, `B`"),
        ("h.py", {"h.py": ""}, "Expected only one class in custom service code or a function"),
        ("h.py:missing", {"h.py": function()}, "defines none"),
        (
            "h.py",
            {"h.py": "class A:\n    def initialize(self, c): pass\n"},
            "Expect handle method in class A",
        ),
        (
            "h.py",
            {"h.py": "class A:\n    def handle(self, d, c): pass\n"},
            "Expect initialize method in class A",
        ),
    ],
)
def test_what_no_retry_heals_is_permanent(make_model, capsys, handler, files, text):
    session, kind, message = bridge.load(make_model(files, handler))
    assert (session, kind) == (None, "permanent")
    assert text in message and "\n" not in message
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        ("raise ValueError('two\\nlines')", "failed", "ValueError: two lines"),
        ("raise MemoryError", "out_of_memory", "MemoryError:"),
        ("raise RuntimeError('CUDA error: x')", "out_of_memory", "RuntimeError: CUDA error: x"),
        (
            "raise AssertionError('not compiled with CUDA')",
            "failed",
            "AssertionError: not compiled with CUDA",
        ),
        ("import nonexistent", "permanent", "ModuleNotFoundError: No module named 'nonexistent'"),
        ("import sys; sys.exit(2)", "failed", "SystemExit: 2"),
    ],
)
@pytest.mark.parametrize(
    "template",
    [
        "class A:\n    def handle(self, d, c): pass\n    def initialize(self, c):\n        {}\n",
        "def handle(data, context):\n    {}\n",
    ],
)
def test_kinds_of_load_failures(make_model, template, statement, kind, message):
    spec = make_model({"handler.py": template.format(statement)})
    assert bridge.load(spec) == (None, kind, message)


def test_a_message_does_not_tell_where_the_model_lies(make_model):
    spec = make_model({"handler.py": "raise ValueError(f'cannot read {__file__}')"})
    assert bridge.load(spec) == (None, "failed", "ValueError: cannot read handler.py")


def test_a_missing_file_that_the_manifest_names_is_permanent(make_model):
    source = class_().replace("self.mark = ", "open('model.pt').close(); self.mark = ")
    spec = make_model({"handler.py": source}, model={"serializedFile": "model.pt"})
    assert bridge.load(spec)[1] == "permanent"
    Path(spec["model_dir"], "model.pt").write_text("")
    assert bridge.load(spec)[1:] == ("", "")


@pytest.mark.parametrize("name", ["random", "wave"])
def test_a_handler_called_like_a_standard_module_does_not_replace_it(load, monkeypatch, name):
    # Whether or not somebody imported the standard one before.
    if name == "wave":
        monkeypatch.delitem(sys.modules, name, raising=False)
    load({f"{name}.py": class_()}, f"{name}.py")
    standard = __import__(name)
    assert standard.__name__ == name and not hasattr(standard, "Handler")


def test_files_named_like_standard_modules_do_not_reach_the_runtime(make_model, tmp_path):
    names = ("base64", "json", "linecache", "logging", "pickle", "tokenize", "traceback", "uuid")
    files = {f"{name}.py": "raise RuntimeError('the runtime got this')\n" for name in names}
    source = "def handle(data, context):\n    if data: raise ValueError('from the handler')\n"
    spec = make_model(files | {"handler.py": source})
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from ts._runtime import bridge; bridge.start_interpreter()\n"
        "session, kind, message = bridge.load(json.loads(sys.argv[2]))\n"
        "assert session, message\n"
        "print(session.run([('id', {}, [('body', '', bytearray(b'x'))])])[0])\n"
        "import ts.torch_handler.vision_handler"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(Path(__file__).parents[1]), json.dumps(spec)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "handler_failed\n"), done.stderr
    assert "ValueError: from the handler" in done.stderr


@pytest.mark.parametrize(
    "handler",
    ["base_handler", "base_handler.py", "base_handler:handle", "ts/base_handler.py:handle"],
)
def test_default_handlers_go_by_their_names(make_model, handler):
    files = {"net.py": "import torch\nclass Net(torch.nn.Identity): pass\n"}
    session, _, message = bridge.load(make_model(files, handler, {"modelFile": "net.py"}))
    assert session is not None, message


def test_dataclasses_and_pickle_find_a_private_modules_classes(load):
    source = """
import dataclasses, pickle
@dataclasses.dataclass
class Row:
    value: "int"
def handle(data, context):
    return data and [pickle.loads(pickle.dumps(Row(3))).value]
"""
    assert load({"json.py": source}, "json.py").run([item()])[3][0][3] == b"3"


def test_a_module_that_failed_to_import_is_imported_anew(make_model):
    spec = make_model({"handler.py": "raise ValueError\n"})
    assert bridge.load(spec)[1] == "failed"
    Path(spec["model_dir"], "handler.py").write_text(function())
    assert bridge.load(spec)[1] == ""


def test_the_working_folder_is_the_models(load):
    source = "import pathlib\n" + function().replace(
        "'own'", "pathlib.Path('near.txt').read_text()"
    )
    session = load({"handler.py": source, "near.txt": "found"})
    assert session.run([item()])[3][0][3] == b"found"
    assert Path(os.getcwd()).name == "model"


def test_model_config_and_manifest_reach_the_context(load, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    source = """
def handle(data, context):
    return data and [[context.model_yaml_config, context.manifest["model"]["modelName"],
                      context.system_properties, context.model_name]]
"""
    session = load(
        {"handler.py": source, "model-config.yaml": "handler:\n  beam: 4\n"},
        model={"configFile": "model-config.yaml", "modelName": "packed as"},
        gpu_id=1,
    )
    config, packed_as, properties, name = json.loads(session.run([item()])[3][0][3])
    assert config == {"handler": {"beam": 4}}
    assert (packed_as, name) == ("packed as", "m")
    assert properties | {"model_dir": ""} == {
        "model_dir": "",
        "gpu_id": 1,
        "batch_size": 4,
        "server_name": "MMS",
        "server_version": "0.1.0",
        "limit_max_image_pixels": True,
    }


def test_a_leased_gpu_that_torch_does_not_see_is_permanent(make_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    spec = make_model({"handler.py": "import torch\n" + function()})
    assert bridge.load(spec | {"gpu_id": 0})[0] is not None
    session, kind, message = bridge.load(spec | {"gpu_id": 1})
    assert (session, kind) == (None, "permanent")
    assert message.startswith("HandlerError: the server leased GPU 1 to this worker")
    assert "number_of_gpu=0" in message


@pytest.mark.parametrize("text", [None, "a: [", "\tx"])
def test_a_model_config_that_cannot_be_read_is_permanent(make_model, text):
    files = {"handler.py": function()} | ({} if text is None else {"c.yaml": text})
    assert bridge.load(make_model(files, model={"configFile": "c.yaml"}))[1] == "permanent"


def test_workers_of_one_host_share_the_module_and_nothing_else(make_model):
    source = """
imported = []
imported.append(1)
class Handler:
    def initialize(self, context): self.context = context
    def handle(self, data, context):
        assert context is self.context
        return [[len(imported), id(self), id(context)]] * len(data)
"""
    spec = make_model({"handler.py": source})
    sessions, answers = [], []

    def worker():
        session, _, message = bridge.load(spec)
        assert session is not None, message
        sessions.append(session)
        answers.append(json.loads(session.run([item()])[3][0][3]))

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer[0] for answer in answers] == [1] * 4
    assert len({answer[1] for answer in answers}) == len({answer[2] for answer in answers}) == 4


def test_a_model_without_torch_never_imports_it(make_model, tmp_path):
    """Importing torch takes seconds; packages that a model does not use are not loaded."""
    spec = make_model({"handler.py": function()})
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from ts._runtime import bridge; bridge.start_interpreter()\n"
        "session, kind, message = bridge.load(json.loads(sys.argv[2]))\n"
        "assert session, message\n"
        "assert session.run([('id', {}, [('body', '', bytearray(b'x'))])])[0] == 'ok'\n"
        "import ts.service, ts.context, ts.utils.util\n"
        "print(sorted({'torch', 'numpy', 'PIL', 'yaml', 'torchvision'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(Path(__file__).parents[1]), json.dumps(spec)],
        capture_output=True,
        check=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout == "[]\n"


def test_intra_op_threads_are_set_in_the_loading_thread_before_the_handler_can_choose(make_model):
    import torch

    source = """
import torch
def handle(data, context):
    if data is None:
        context.found = torch.get_num_threads()
        return None
    return [context.found]
"""
    spec = make_model({"handler.py": source}, intra_op_threads=3)
    found = []

    def worker():
        session, _, message = bridge.load(spec)
        assert session is not None, message
        found.extend((session.run([item()])[3][0][3], torch.get_num_threads()))

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert found == [b"3", 3]
