"""Chat templates in the manner of published ones, and conversations for them."""

TEMPLATES = {
    "marks": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set is_past = message.role == 'assistant' and loop.index0 < ns.last %}
    {%- if is_past and '</think>' in message.content %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set text = message.content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "turns": """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate, and the user begins') }}
{% endif %}
{% if message['role'] == 'user' %}
[INST] {{ message['content'] | trim }} [/INST]
{% elif message['role'] == 'assistant' %}
{% generation %} {{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}
{% else %}
{{ raise_exception('no role ' + message['role']) }}
{% endif %}
{% endfor %}
""",
    "json": """\
{%- for message in messages -%}
{{ message | tojson(indent=2) }}
{{ message.items() | list | length }}{% if loop.index > 2 %}{% break %}{% endif %}
{%- endfor -%}
{% macro ask(text, end='!') %}{{ text ~ end }}{% endmacro %}{{ ask('reply') }}
""",
}

USER = {"role": "user", "content": "What is <b>1 & 1</b>? “quoted” \U0001f600"}
CONVERSATIONS = {
    "one": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief.\n"}, USER]},
    "turns": {
        "messages": [
            USER,
            {"role": "assistant", "content": "<think>hm</think>\n\n Two. "},
            {"role": "user", "content": "  And 2 + 2?  "},
        ]
    },
    "tools": {
        "messages": [USER],
        "tools": [
            {
                "type": "function",
                "function": {"name": "add", "description": "a < b & 'c'", "parameters": {"é": [1]}},
            }
        ],
    },
    "arguments": {"messages": [USER], "template_kwargs": {"enable_thinking": False}},
    "odd role": {"messages": [{"role": "robot", "content": "x"}]},
}
