"""litellm's SDK, through OpenAI's and Anthropic's protocols. Arguments: base address, model."""

import sys

import litellm

url, model = sys.argv[1:]
fields = {
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "max_tokens": 8,
    "num_retries": 0,
}
openai = {
    "model": f"openai/{model}",
    "api_base": f"{url}/v1",
    "api_key": "unused",
    "extra_body": {"thinking": {"type": "disabled"}},
    "temperature": 0,
}
whole = litellm.completion(**openai, **fields)
assert whole.usage.completion_tokens <= 8
pieces = [
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(**openai, **fields, stream=True)
]
assert "".join(pieces) == whole.choices[0].message.content
reasoning = litellm.completion(**{**openai, "extra_body": {}}, **fields)
assert reasoning.choices[0].message.reasoning_content
tool = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"windy": {"type": "boolean"}},
            "required": ["windy"],
            "additionalProperties": False,
        },
    },
}
forced = litellm.completion(**openai, **{**fields, "max_tokens": 64}, tools=[tool], tool_choice="required")
assert forced.choices[0].finish_reason == "tool_calls"
assert forced.choices[0].message.tool_calls[0].function.name == "f"
message = litellm.completion(model=f"anthropic/{model}", api_base=url, api_key="unused", **fields)
assert message.usage.completion_tokens <= 8
print("litellm: answer, stream, reasoning, forced call, Anthropic's protocol")
