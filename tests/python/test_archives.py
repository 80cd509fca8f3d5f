"""Every form that an archive can have, packed by the real archiver, gives the same answers."""

import io
import json
import os
import tarfile

import pytest
from harness import archive, write_files

HANDLER = """
import os
import helper

class Handler:
    def initialize(self, context):
        folder = context.system_properties["model_dir"]
        with open(os.path.join(folder, context.manifest["model"]["serializedFile"])) as file:
            self.weight = int(file.read())
        self.entry = context.manifest["model"]

    def handle(self, data, context):
        if bytes(data[0]["body"]) == b"manifest":
            return [self.entry]
        return [helper.product(self.weight, int(bytes(row["body"]))) for row in data]
"""
HELPER = """
def product(a, b):
    return a * b
"""
FORMS = {"default": "m.mar", "zip-store": "m.mar", "tgz": "m.tar.gz", "no-archive": "m"}


@pytest.fixture
def sources(tmp_path):
    files = {"src/handler.py": HANDLER, "src/deep/weights.bin": "7", "lib/helper.py": HELPER}
    write_files(tmp_path, files | {"net/model.py": "class Net:\n    pass\n"})
    return tmp_path


def flags(sources):
    return [
        *("--model-name", "m", "--version", "1.0", "--handler", sources / "src/handler.py"),
        *("--serialized-file", sources / "src/deep/weights.bin"),
        *("--model-file", sources / "net/model.py", "--extra-files", sources / "lib"),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_answers_ar_05_ar_06(server, sources, form):
    packed = sources / "packed"
    archive(packed, *flags(sources), "--archive-format", form)
    target = server.store / f"{form}-{FORMS[form]}"
    (packed / FORMS[form]).rename(target)
    answer = server.register(target.name, model_name=form)
    assert answer.status_code == 200, answer.text
    assert server.predict(form, b"6").text == "42"
    entry = server.predict(form, b"manifest").json()
    # Base names only: nothing of the machine that it was packed on.
    assert entry["serializedFile"] == "weights.bin"
    assert entry["modelFile"] == "model.py"
    assert str(sources) not in json.dumps(entry)


@pytest.mark.parametrize("where", ["store", "elsewhere", "store/"])
def test_a_folder_is_served_by_its_absolute_path(server, sources, where):
    name = {"store": "inside", "elsewhere": "outside", "store/": "slash"}[where]
    packed = server.store if where.startswith("store") else sources / "packed"
    model = [name if flag == "m" else flag for flag in flags(sources)]
    archive(packed, *model, "--archive-format", "no-archive")
    url = f"{packed / name}/" if where.endswith("/") else packed / name
    answer = server.register(url)
    assert answer.status_code == 200, answer.text
    assert server.predict(name, b"2").text == "14"
    answer = server.manage("DELETE", f"/models/{name}")
    assert answer.status_code == 200, answer.text
    assert (packed / name / "helper.py").exists(), "a folder is not the server's to delete"


def test_an_archive_may_be_a_symbolic_link(server, sources):
    archive(sources / "packed", *flags(sources))
    os.symlink(sources / "packed/m.mar", server.store / "link.mar")
    assert server.register("link.mar", model_name="linked").status_code == 200
    assert server.predict("linked", b"3").text == "21"


@pytest.mark.parametrize("prefix", ["", "./", "m/", "./m/"])
def test_both_layouts_of_a_tar_are_read_ar_05(server, prefix):
    name = "tar" + "".join("d" if letter == "." else letter for letter in prefix.replace("/", "s"))
    manifest = {"runtime": "python", "model": {"modelName": name, "modelVersion": "1.0"}}
    manifest["model"] |= {"handler": "handler.py", "serializedFile": "weights.bin"}
    members = {
        "MAR-INF/MANIFEST.json": json.dumps(manifest),
        "handler.py": "import pkg.helper, sys\nsys.modules['helper'] = pkg.helper\n" + HANDLER,
        "pkg/helper.py": HELPER,
        "weights.bin": "5",
    }
    with tarfile.open(server.store / f"{name}.tar.gz", "w:gz") as tar:
        for member, text in members.items():
            entry = tarfile.TarInfo(prefix + member)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    answer = server.register(f"{name}.tar.gz")
    assert answer.status_code == 200, answer.text
    assert server.predict(name, b"4").text == "20"


def test_folders_among_extra_files_keep_their_names_if_asked_ar_02(server, tmp_path):
    handler = """
import lib1.mod, lib2.mod, lib2.sub.deep

def handle(data, context):
    return [f"{lib1.mod.WHO} {lib2.mod.WHO} {lib2.sub.deep.WHO}"] if data else None
"""
    files = {"h.py": handler, "lib1/mod.py": "WHO = 'one'", "lib2/mod.py": "WHO = 'two'"}
    write_files(tmp_path, files | {"lib2/sub/deep.py": "WHO = 'three'"})
    extra = f"{tmp_path / 'lib1'},{tmp_path / 'lib2'}"
    model = ["--model-name", "kept", "--version", "2", "--handler", tmp_path / "h.py"]
    archive(server.store, *model, "--extra-files", extra, "--keep-dirs")
    assert server.register("kept.mar").status_code == 200
    assert server.predict("kept/2", b"x").text == "one two three"
