# SPDX-License-Identifier: Apache-2.0
"""YAML with lines: where each field stands, and what is refused with which words."""

import pytest

from quire_operator.api.yaml_manifest import ManifestError, parse_manifests, read_manifests


def only(text):
    (document,) = parse_manifests(text, "f.yaml")
    return document


def test_every_field_and_entry_has_a_line():
    document = only("# a comment\na: 1\nb:\n  c:\n  - x: 1\n  - {x: 2,\n     y: 3}\n")
    assert document.body == {"a": 1, "b": {"c": [{"x": 1}, {"x": 2, "y": 3}]}}
    assert document.location(()) == "f.yaml:2"
    assert document.location(("b", "c", 0, "x")) == "f.yaml:5"
    assert document.location(("b", "c", 1, "y")) == "f.yaml:7"


def test_missing_field_has_the_line_of_its_parent():
    document = only("a: 1\nb:\n  c: 2\n")
    assert document.location(("b", "d", 0)) == "f.yaml:2"
    assert document.location(("e",)) == "f.yaml:1"


def test_line_numbers_continue_over_documents_and_empty_ones_are_dropped():
    first, second = parse_manifests("a: 1\n---\n---\n# nothing\n---\nb: 2\n", "f.yaml")
    assert (first.location(("a",)), second.location(("b",))) == ("f.yaml:1", "f.yaml:6")


def test_dates_and_keys_are_strings():
    assert only("revision: 2026-01-01\n1: one\n").body == {"revision": "2026-01-01", "1": "one"}


def test_aliases_and_merge_keys_as_in_kubectl():
    document = only("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: {<<: *a, y: 4}\n")
    assert document.body == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2},
        "d": {"x": 1, "y": 4},
    }


def test_nested_merges_are_not_duplicate_keys():
    document = only("a: {<<: &m {<<: {x: 1}, x: 2}}\nb: *m\nc: {<<: [{x: 1}, {x: 2, y: 2}], z: '='}\nd: =\n")
    assert document.body == {"a": {"x": 2}, "b": {"x": 2}, "c": {"x": 1, "y": 2, "z": "="}, "d": "="}


def test_nested_merges_are_bounded():
    inner = ", ".join(f"&a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 20))
    assert only(f"a: {{<<: [&a0 {{x: 1}}, {inner}]}}\n").body == {"a": {"x": 1}}
    big = f"a: &a {{{', '.join(f'k{i}: 1' for i in range(2000))}}}\nb: {{<<: [{', '.join(['{<<: *a}'] * 100)}]}}\n"
    with pytest.raises(ManifestError, match="more than 100000 values"):
        only(big)


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", "f.yaml:2:2: not YAML: did not find expected ',' or ']'"),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: key 'a' already exists in line 1; remove one of the two"),
        ("a: &a {b: *a}\n", "f.yaml:1:4: more than 100000 values, or a recursive alias"),
        (BOMB, "f.yaml:1:"),
        ("[a]: 1\n", "f.yaml:1:1: a key is not a string"),
        (
            "a: {{ .b }}\n",
            "f.yaml:1:5: a key is not a string; quote the key, or if it contains {{ }}, render the template first",
        ),
        ("a:\n\tb: 1\n", "f.yaml:2:1: not YAML: found character that cannot start any token; indent with spaces"),
        ("a: 1\nb:2\nc: 3\n", "f.yaml:2:1: not YAML: could not find expected ':'; write key: value"),
        ("a: b: c\n", "f.yaml:1:5: not YAML: mapping values are not allowed in this context; correct the indentation"),
        ("a: 1\nb: 'c\nd: 1\n", "f.yaml:2:4: not YAML: found unexpected end of stream; close the quotes that begin"),
        ("a: !!python/object:os.system x\n", "f.yaml:1:4: not YAML: could not determine a constructor for the tag"),
        ("a: " + 500 * "[", "f.yaml:1:104: more than 100 nested objects and lists"),
        # From 1,000 levels on, the column and the message depend on PyYAML's release.
        ("a: " + 100_000 * "[", "f.yaml:1:10"),
        ("a: &a {<<: *a, b: 1}\n", "f.yaml:1:4: more than 100000 values, or a recursive alias"),
        (
            "a: {<<: 1}\n",
            "f.yaml:1:9: << must be followed by an object or a list of objects; if << is the name of a key, quote it",
        ),
        ("a: !!timestamp b\n", 'f.yaml:1:4: "b" is not a valid timestamp; put it in quotes'),
        ("a: " + 5000 * "9" + "\n", 'f.yaml:1:4: "9999'),
        ("a: -.inf\n", 'f.yaml:1:4: "-.inf" is a float, and JSON has no such type; put it in quotes'),
        ("a: \x07\n", "f.yaml: not YAML: unacceptable character"),
    ],
)
def test_error_messages(text, message):
    with pytest.raises(ManifestError) as error:
        list(parse_manifests(text, "f.yaml"))
    assert str(error.value).startswith(message)


def test_unreadable_files_are_reported(tmp_path):
    with pytest.raises(ManifestError, match=r"none\.yaml: No such file or directory; give the path of a YAML file"):
        read_manifests(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ManifestError, match=r"latin\.yaml: not UTF-8 at byte 3; save the file as UTF-8"):
        read_manifests(str(tmp_path / "latin.yaml"))
