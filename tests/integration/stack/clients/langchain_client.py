"""langchain-openai: answer, stream, tools, structured output. Arguments: base address, model."""

import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
PLAIN = {"thinking": {"type": "disabled"}}
chat = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key="unused",
    model=model,
    temperature=0,
    max_tokens=96,
    max_retries=0,
    extra_body=PLAIN,
)


class Weather(BaseModel):
    """A short answer."""

    windy: bool
    code: str = Field(max_length=4)


@tool
def get_weather(code: str) -> str:
    """Weather lookup."""
    return "sunny in " + code


short = chat.bind(max_tokens=8)
whole = short.invoke([HumanMessage("What is the weather?")])
assert isinstance(whole, AIMessage)
assert whole.usage_metadata is not None
assert whole.usage_metadata["output_tokens"] <= 8
streamed = "".join(str(chunk.content) for chunk in short.stream([HumanMessage("What is the weather?")]))
assert streamed == whole.content
answer = chat.with_structured_output(Weather, method="json_schema").invoke("What is the weather?")
assert isinstance(answer, Weather)
forced = chat.bind_tools([Weather], tool_choice="required").invoke("What is the weather?")
(call,) = forced.tool_calls
Weather(**call["args"])
again = short.bind_tools([Weather, get_weather]).invoke(
    [HumanMessage("What is the weather?"), forced, ToolMessage("noted", tool_call_id=call["id"])]
)
assert again.usage_metadata is not None
print("langchain-openai: answer, stream, structured output, forced call, tool loop")
