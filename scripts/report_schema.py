"""Write docs/report.schema.json, which follows from the dataclasses of a report.

python -m scripts.report_schema
"""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from infer.results.schema import SCHEMA_VERSION, Report

SCHEMA_FILE = Path(__file__).parents[1] / "docs" / "report.schema.json"


class ReportJsonSchema(GenerateJsonSchema):
    """A schema whose objects have the fields of a dataclass and no others, without their titles."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        content = super().dataclass_schema(schema)
        content.pop("description", None)  # releases of pydantic differ in what they make of it
        return {**content, "additionalProperties": False}

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def build_schema() -> str:
    """Return the content of the file."""
    schema = TypeAdapter(Report).json_schema(schema_generator=ReportJsonSchema)
    header = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": f"Speculative decoding report, version {SCHEMA_VERSION}",
        "description": "report.json of a run. docs/report.md defines every field.",
    }
    return json.dumps({**schema, **header}, indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(build_schema(), encoding="utf-8")
