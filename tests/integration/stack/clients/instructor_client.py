"""instructor in its JSON and tool modes. Arguments: base address, model."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]


class Weather(BaseModel):
    """A short answer. Nothing may be added, or a model that was not trained would add for ever."""

    model_config = ConfigDict(extra="forbid")

    windy: bool
    code: str = Field(max_length=4)


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather?"}],
        response_model=Weather,
        max_tokens=400,  # a demo vocabulary takes many for the markup of a call
        temperature=0,
        max_retries=0,
        extra_body={"thinking": {"type": "disabled"}},
    )
    assert isinstance(found, Weather), mode
print("instructor: JSON schema, tools, strict tools")
