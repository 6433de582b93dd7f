# SPDX-License-Identifier: Apache-2.0
"""Questions about tables, and the SQL query that answers each question.

The module owns the tables and the wording of questions. A test creates the tables (`TABLES`) in a database and queries
them. `corpus` calls this module to generate the documents for the sql adapter.
"""

import random
from dataclasses import dataclass

import grammar

CITIES = grammar.words(
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Warsaw Tokyo Boston Chicago Lima"
)
_NAMES = grammar.words(
    "Anna Lily Mia Rosa Emma Clara Nora Ella Ruby Sara Tom Max Ben Leo Sam Oscar Finn Jack Hugo Paul"
)


@dataclass(frozen=True, slots=True)
class Text:
    """A column of words."""

    name: str
    """Name of the column in SQL and in questions."""
    plural: str
    """Plural of the name, for questions about all values."""
    values: tuple[str, ...]
    """Values that rows can contain; no value contains a quote."""
    phrases: tuple[str, ...]
    """A question uses one of these phrases to select the rows that have the value `{v}`."""


@dataclass(frozen=True, slots=True)
class Number:
    """A column of whole numbers."""

    name: str
    """Name of the column in SQL and in questions."""
    plural: str
    """Plural of the name, for questions about all values."""
    values: range
    """The values that rows can contain. Questions compare the column with one of them."""
    more: tuple[str, ...]
    """A question uses one of these phrases to select the rows with a value above `{v}`."""
    less: tuple[str, ...]
    """A question uses one of these phrases to select the rows with a value below `{v}`."""
    ends: tuple[str, str]
    """Adjectives for the row with the highest value and for the row with the lowest value."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table. Its name is a plural noun, because questions contain it."""

    name: str
    """Name of the table in SQL and in questions."""
    texts: tuple[Text, ...]
    """The columns that contain words. A question uses the first of them to identify a row."""
    numbers: tuple[Number, ...]
    """The columns that contain numbers. A table has at least one."""

    @property
    def columns(self) -> list[Text | Number]:
        """All columns of the table. Those that contain words come first."""
        return [*self.texts, *self.numbers]


def _text(name: str, plural: str, values: tuple[str, ...], *phrases: str) -> Text:
    return Text(name, plural, values, (*phrases, f"whose {name} is {{v}}", f"with {name} {{v}}"))


def _number(name: str, plural: str, values: range, more: str, less: str, ends: tuple[str, str]) -> Number:
    return Number(
        name,
        plural,
        values,
        (more, f"with a {name} above {{v}}", f"whose {name} is more than {{v}}"),
        (less, f"with a {name} below {{v}}", f"whose {name} is less than {{v}}"),
        ends,
    )


_NAME = _text("name", "names", _NAMES, "named {v}", "called {v}")
_CITY = _text("city", "cities", CITIES, "in {v}", "from {v}", "who live in {v}")
_AGE = Number(
    "age",
    "ages",
    range(18, 80),
    ("older than {v}", "over {v}", "whose age is more than {v}"),
    ("younger than {v}", "under {v}", "whose age is less than {v}"),
    ("oldest", "youngest"),
)
_PRICE = _number(
    "price", "prices", range(2, 500), "that cost more than {v}", "cheaper than {v}", ("most expensive", "cheapest")
)

TABLES = (
    Table("customers", (_NAME, _CITY), (_AGE,)),
    Table(
        "employees",
        (
            _NAME,
            _text(
                "department",
                "departments",
                grammar.words("Sales Marketing Support Finance Research Design"),
                "in {v}",
                "who work in {v}",
                "in the {v} department",
            ),
            _CITY,
        ),
        (
            _AGE,
            _number(
                "salary",
                "salaries",
                range(1000, 9000, 100),
                "who earn more than {v}",
                "who earn less than {v}",
                ("best paid", "worst paid"),
            ),
        ),
    ),
    Table(
        "products",
        (
            _text("name", "names", grammar.words("lamp chair table kite drum bicycle clock ball"), "named {v}"),
            _text("color", "colors", grammar.words("red blue green yellow black white"), "in {v}", "that are {v}"),
        ),
        (
            _PRICE,
            _number(
                "stock",
                "stocks",
                range(1, 200),
                "with more than {v} in stock",
                "with fewer than {v} in stock",
                ("most common", "rarest"),
            ),
        ),
    ),
    Table(
        "orders",
        (
            _text("customer", "customers", _NAMES, "from {v}", "placed by {v}"),
            _text("status", "statuses", grammar.words("open paid shipped cancelled"), "that are {v}"),
        ),
        (_number("total", "totals", range(10, 1000), "over {v}", "under {v}", ("largest", "smallest")),),
    ),
    Table(
        "books",
        (
            _text("title", "titles", grammar.words("Winter Rain Stars Home Rivers Gardens"), "titled {v}"),
            _text("author", "authors", _NAMES, "by {v}", "written by {v}"),
        ),
        (
            _PRICE,
            _number(
                "year",
                "years",
                range(1950, 2025),
                "published after {v}",
                "published before {v}",
                ("newest", "oldest"),
            ),
        ),
    ),
)

_KEYWORDS = "SELECT FROM WHERE AND GROUP ORDER BY DESC LIMIT COUNT(*) AVG( MAX( MIN( SUM( ) > < = ; DISTINCT *"
_ASKED = "list show find give me all how many what is the are there average highest lowest total first for each SQL:"
_COLUMNS = tuple(column for table in TABLES for column in table.columns)
_PHRASES = tuple(
    phrase.replace("{v}", "").strip()
    for table in TABLES
    for phrase in (
        *(phrase for column in table.texts for phrase in column.phrases),
        *(phrase for column in table.numbers for phrase in (*column.more, *column.less, *column.ends)),
    )
)
# There are few keywords and many values, but each answer contains keywords. Therefore, the list repeats the keywords.
WORDS = (
    *_KEYWORDS.split() * 4,
    *_ASKED.split() * 2,
    *(table.name for table in TABLES),
    *(column.name for column in _COLUMNS),
    *(column.plural for column in _COLUMNS),
    *(f"'{value}'" for table in TABLES for column in table.texts for value in column.values),
    *_PHRASES,
)
"""All words that questions and answers contain. `notes` and `facts` use them in texts that the model must repeat."""


def prompt(question: str) -> str:
    """Return the prompt for a question. In the training text, a space and the SQL follow it."""
    return f"Question: {question}\nSQL:"


def pair(rng: random.Random) -> tuple[str, str]:
    """Return a question and its SQL, which ends with a semicolon."""
    ask = rng.choice((_list, _list, _list, _count, _count, _rank, _most, _aggregate, _group, _distinct))
    question, query = ask(rng, rng.choice(TABLES))
    if rng.random() < 0.5:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.3:
        question += "?" if question.lower().startswith(("what", "how", "who")) else "."
    return question, query


def _list(rng: random.Random, table: Table) -> tuple[str, str]:
    asked, where = _filter(rng, table)
    lead = rng.choice(("list", "show", "find", "give me", "show me", "what are"))
    if rng.random() < 0.2:
        return f"{rng.choice(('list', 'show', 'find'))} all {table.name}{asked}", f"SELECT * FROM {table.name}{where};"
    columns = rng.sample(table.columns, rng.choice((1, 1, 1, 2)))
    named = " and ".join(column.plural for column in columns)
    selected = ", ".join(column.name for column in columns)
    return f"{lead} the {named} of {table.name}{asked}", f"SELECT {selected} FROM {table.name}{where};"


def _count(rng: random.Random, table: Table) -> tuple[str, str]:
    asked, where = _filter(rng, table)
    ways = ["how many {}{} are there", "count the {}{}", "what is the number of {}{}"]
    if asked.startswith((" in ", " from ", " older", " younger", " over ", " under ", " cheaper")):
        ways.append("how many {} are{}")
    return rng.choice(ways).format(table.name, asked), f"SELECT COUNT(*) FROM {table.name}{where};"


def _rank(rng: random.Random, table: Table) -> tuple[str, str]:
    shown, number = table.texts[0], rng.choice(table.numbers)
    descending = rng.random() < 0.5
    order = f"ORDER BY {number.name}{' DESC' if descending else ''}"
    base = f"SELECT {shown.name} FROM {table.name}"
    if rng.random() < 0.5:
        way = "highest" if descending else "lowest"
        return f"list the {shown.plural} of {table.name} by {number.name}, {way} first", f"{base} {order};"
    limit, way = rng.randint(2, 9), "highest" if descending else "lowest"
    return (
        f"{rng.choice(('list', 'show'))} the {limit} {table.name} with the {way} {number.name}",
        f"SELECT * FROM {table.name} {order} LIMIT {limit};",
    )


def _most(rng: random.Random, table: Table) -> tuple[str, str]:
    shown, number, end = table.texts[0], rng.choice(table.numbers), rng.randrange(2)
    question = rng.choice(("what is the {} of the {} {}", "show the {} of the {} {}"))
    order = f"ORDER BY {number.name}{('', ' DESC')[end == 0]}"
    return (
        question.format(shown.name, number.ends[end], table.name.removesuffix("s")),
        f"SELECT {shown.name} FROM {table.name} {order} LIMIT 1;",
    )


def _aggregate(rng: random.Random, table: Table) -> tuple[str, str]:
    asked, where = _filter(rng, table)
    number = rng.choice(table.numbers)
    word, function = rng.choice((("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")))
    return (
        f"what is the {word} {number.name} of {table.name}{asked}",
        f"SELECT {function}({number.name}) FROM {table.name}{where};",
    )


def _group(rng: random.Random, table: Table) -> tuple[str, str]:
    by = rng.choice(table.texts)
    if rng.random() < 0.5:
        question = rng.choice(("how many {} are there for each {}", "count the {} for each {}"))
        return question.format(table.name, by.name), f"SELECT {by.name}, COUNT(*) FROM {table.name} GROUP BY {by.name};"
    number = rng.choice(table.numbers)
    return (
        f"what is the average {number.name} of {table.name} for each {by.name}",
        f"SELECT {by.name}, AVG({number.name}) FROM {table.name} GROUP BY {by.name};",
    )


def _distinct(rng: random.Random, table: Table) -> tuple[str, str]:
    column = rng.choice(table.texts)
    return (
        f"{rng.choice(('list', 'show'))} the different {column.plural} of {table.name}",
        f"SELECT DISTINCT {column.name} FROM {table.name};",
    )


def _filter(rng: random.Random, table: Table) -> tuple[str, str]:
    """Return a condition in words, and the same condition as a WHERE clause. Both texts are empty, or both start with a
    space."""
    text, number = rng.choice(table.texts), rng.choice(table.numbers)
    kind = rng.choice(("none", "text", "text", "number", "number", "both"))
    if kind == "none":
        return "", ""
    by_text, by_number = _equal(rng, text), _compare(rng, number)
    if kind == "text":
        return f" {by_text[0]}", f" WHERE {by_text[1]}"
    if kind == "number":
        return f" {by_number[0]}", f" WHERE {by_number[1]}"
    return f" {by_text[0]} and {by_number[0]}", f" WHERE {by_text[1]} AND {by_number[1]}"


def _equal(rng: random.Random, column: Text) -> tuple[str, str]:
    value = rng.choice(column.values)
    return rng.choice(column.phrases).format(v=value), f"{column.name} = '{value}'"


def _compare(rng: random.Random, column: Number) -> tuple[str, str]:
    value, above = rng.choice(column.values), rng.random() < 0.5
    phrases = column.more if above else column.less
    return rng.choice(phrases).format(v=value), f"{column.name} {'>' if above else '<'} {value}"
