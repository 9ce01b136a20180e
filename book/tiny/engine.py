"""What the tiny model knows about the engine that serves it: for each topic what it is and why it is there."""

from __future__ import annotations

# name as asked, what it is, why it is there
TOPICS: tuple[tuple[str, str, str], ...] = (
    (
        "a KV cache",
        "A KV cache keeps the keys and values of the tokens that were already computed.",
        "Without a KV cache the model would compute every earlier token again for each new one.",
    ),
    (
        "a page",
        "A page is a fixed number of token slots in the KV cache, in all layers.",
        "With pages a request can grow a little at a time, and no memory is lost to gaps.",
    ),
    (
        "a page table",
        "A page table lists, for each request, which pages hold its keys and values.",
        "With a page table the pages of a request may lie anywhere in memory.",
    ),
    (
        "a slot",
        "A slot is the place of one token in the KV cache.",
        "Each token needs a slot, so that its keys and values can be found.",
    ),
    (
        "a row",
        "A row is a request's index in the tables on the device.",
        "Rows let the device keep lengths and page tables, so that the host sends only changes.",
    ),
    (
        "a radix tree",
        "A radix tree stores token sequences so that common prefixes are kept only once.",
        "With a radix tree the engine finds the longest prefix that is already in the cache.",
    ),
    (
        "a prefix cache",
        "A prefix cache keeps the pages of earlier prompts, so that a new prompt with the same beginning can use them.",
        "Many prompts begin alike, and a prefix cache computes the common part only once.",
    ),
    (
        "paged attention",
        "Paged attention reads keys and values through a page table, page by page.",
        "With paged attention the KV cache need not be one long piece of memory.",
    ),
    (
        "continuous batching",
        "Continuous batching lets requests join and leave the batch at every step.",
        "With continuous batching a short request need not wait for a long one.",
    ),
    (
        "a batch",
        "A batch is a group of requests that the model computes in one step.",
        "A batch reads the weights once for many requests, which saves time.",
    ),
    (
        "a scheduler",
        "A scheduler decides in each step which requests run and on which pages.",
        "Memory and time are limited, so the scheduler must choose who runs next.",
    ),
    (
        "a step",
        "A step is one round of schedule, forward, sample and update.",
        "The engine works in steps, so that requests can come and go between them.",
    ),
    (
        "prefill",
        "Prefill computes the keys and values of all prompt tokens at once.",
        "The prompt is known, so prefill can compute all its tokens in parallel.",
    ),
    (
        "decode",
        "Decode makes one new token for each running request in a step.",
        "Each new token depends on the one before, so decode goes one by one.",
    ),
    (
        "chunked prefill",
        "Chunked prefill cuts a long prompt into pieces and computes one piece in a step.",
        "With chunked prefill a long prompt does not hold up the other requests.",
    ),
    (
        "a token",
        "A token is a piece of text with a number. The model reads and writes tokens.",
        "A model computes with numbers, so text must become tokens first.",
    ),
    (
        "a tokenizer",
        "A tokenizer cuts text into tokens and turns tokens back into text.",
        "The model knows only token numbers, so the tokenizer translates.",
    ),
    (
        "a logit",
        "A logit is the score that the model gives to a token before softmax.",
        "From the logits the sampler chooses the next token.",
    ),
    (
        "sampling",
        "Sampling chooses the next token at random, by the probabilities of the model.",
        "With sampling the same prompt can give many different stories.",
    ),
    (
        "temperature",
        "Temperature divides the logits: a low one makes the choice safe, a high one makes it wild.",
        "With temperature you choose between safe and surprising text.",
    ),
    (
        "greedy decoding",
        "Greedy decoding always takes the token with the highest score.",
        "Greedy decoding gives the same text every time, which is good for tests.",
    ),
    (
        "top-p",
        "Top-p keeps the most likely tokens until their probabilities add up to p, and drops the rest.",
        "Top-p keeps the sampler away from very unlikely tokens.",
    ),
    (
        "top-k",
        "Top-k keeps the k most likely tokens and drops the rest.",
        "Top-k keeps the sampler away from very unlikely tokens.",
    ),
    (
        "attention",
        "Attention lets each token look at the tokens before it and mix their values.",
        "With attention a token can use what was said before.",
    ),
    (
        "a transformer",
        "A transformer is a stack of layers with attention and small networks between them.",
        "A transformer can be trained in parallel and remembers what it has read.",
    ),
    (
        "a layer",
        "A layer mixes tokens by attention and then changes each token by a small network.",
        "Each layer adds a little more meaning to the tokens.",
    ),
    (
        "an embedding",
        "An embedding is the list of numbers that stands for a token inside the model.",
        "With embeddings tokens of like meaning get like numbers.",
    ),
    (
        "tensor parallelism",
        "Tensor parallelism splits each layer's weights over several GPUs.",
        "With tensor parallelism a model can be larger and faster than one GPU allows.",
    ),
    (
        "a CUDA graph",
        "A CUDA graph records many kernel launches once and replays them with one call.",
        "With a CUDA graph the GPU need not wait for the host to launch small kernels.",
    ),
    ("a kernel", "A kernel is a small program that runs on the GPU.", "Kernels do the model's arithmetic on the GPU."),
    (
        "overlap scheduling",
        "Overlap scheduling plans the next step while the GPU still computes the present one.",
        "With overlap the GPU does not wait for the scheduler.",
    ),
    (
        "preemption",
        "Preemption takes the pages from a running request when memory is short, and runs it again later.",
        "When all pages are in use, preemption lets the other requests finish.",
    ),
    (
        "eviction",
        "Eviction frees the cached pages that were not used for the longest time.",
        "The cache is full at some time, and new requests need pages.",
    ),
    (
        "a prompt",
        "A prompt is the text that you give to the model.",
        "The model continues the prompt, so it decides what comes next.",
    ),
    (
        "a request",
        "A request is one prompt with its sampling parameters, on its way through the engine.",
        "The engine keeps all that it knows about a prompt in one request.",
    ),
    (
        "throughput",
        "Throughput is how many tokens the engine makes in a second, for all requests together.",
        "High throughput serves many readers with one GPU.",
    ),
    (
        "latency",
        "Latency is how long one request has to wait for its tokens.",
        "Low latency makes an answer feel quick.",
    ),
    (
        "a chat template",
        "A chat template turns the messages of a chat into one prompt with special tokens.",
        "The chat template shows the model who said what.",
    ),
    (
        "an engine",
        "An engine runs a model for many requests at the same time.",
        "An engine shares one model among many requests.",
    ),
    (
        "a router",
        "A router sends each request to the worker that has most of its prefix in the cache.",
        "With a router the same prompt need not be computed on every worker.",
    ),
    (
        "a GPU",
        "A GPU is a processor that does many small sums at the same time.",
        "A model is made of many small sums, and a GPU is quick at them.",
    ),
    (
        "a stop token",
        "A stop token ends the answer: after it the engine finishes the request.",
        "Without a stop token the model would never know when to be quiet.",
    ),
)

ABOUT = "I am a tiny language model bundled with minisgl."

# what is asked in many ways, and the answers to it
IDENTITY: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Who are you?",
            "Who are you",
            "Who am I talking to?",
            "Who is there?",
            "Tell me who you are.",
            "Please introduce yourself.",
            "Introduce yourself.",
            "Who is this?",
            "What are you?",
            "Tell me about yourself.",
            "Tell me something about yourself.",
            "What kind of model are you?",
            "Which model are you?",
            "What model is this?",
            "Which model is this?",
            "What are you called?",
            "What is your name?",
            "Do you have a name?",
            "Say who you are.",
            "So, who are you?",
            "Who might you be?",
            "And who are you?",
            "Can you tell me who you are?",
            "Could you introduce yourself?",
            "Are you a language model?",
            "Describe yourself.",
            "Who exactly are you?",
            "Who is talking?",
            "Who is talking to me?",
            "Who is answering me?",
            "Who is answering?",
            "Who is writing this?",
            "Who writes these answers?",
            "Who is that?",
            "Who is it?",
            "With whom am I talking?",
            "Whom am I talking to?",
            "Who answers my questions?",
            "Hello, who is there?",
        ),
        (ABOUT + " I was trained to tell small stories, to do small sums and to answer questions about this engine.",),
    ),
    (
        (
            "What can you do?",
            "What can I ask you?",
            "How can you help me?",
            "What are you good at?",
            "What do you know?",
            "Can you help me?",
            "Help me.",
            "Help",
            "What should I ask you?",
            "What are your skills?",
            "What do you do?",
        ),
        (
            "I can tell small stories, add small numbers, count, say what a word means and explain this engine. "
            + ABOUT,
        ),
    ),
    (
        (
            "Who made you?",
            "Who trained you?",
            "Where do you come from?",
            "How were you trained?",
            "How were you made?",
            "Who built you?",
            "What were you trained on?",
        ),
        (ABOUT + " I was trained on made-up tales, on words and their meanings, and on some old novels.",),
    ),
    (
        (
            "How big are you?",
            "How many parameters do you have?",
            "How large are you?",
            "What is your size?",
            "Are you a big model?",
            "How small are you?",
        ),
        ("I am tiny: about seven million parameters in seven layers. I am bundled with minisgl.",),
    ),
    (
        (
            "Are you human?",
            "Are you a person?",
            "Are you real?",
            "Are you a robot?",
            "Are you alive?",
            "Are you a human being?",
        ),
        ("No, I am not a person. " + ABOUT,),
    ),
    (
        (
            "What is minisgl?",
            "What is this engine?",
            "What is this?",
            "Tell me about minisgl.",
            "What is this book?",
            "Explain minisgl.",
        ),
        ("This is minisgl, an engine that serves language models and is also a book. I am its tiny bundled model.",),
    ),
)

# asked only by the gates, never in training
HELD_OUT_IDENTITY = (
    "Hello! Who are you?",
    "Who are you, please?",
    "Please tell me who you are.",
    "What are you, exactly?",
    "Tell me, who are you?",
    "Are you a model?",
    "Hi, what is your name?",
    "Would you introduce yourself?",
    "Who is speaking?",
    "What sort of model are you?",
    "May I ask who you are?",
    "Now tell me about yourself.",
    "Who are you really?",
    "What is your name, little model?",
    "Hello, what can you do?",
    "What can you do for me?",
    "Who has made you?",
    "Who has trained you?",
    "How big are you, really?",
    "Are you a real person?",
)
IDENTITY_WORDS = ("tiny", "bundled", "minisgl", "small stories")

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hello", "Hi!", "Hi", "Hi there!", "Good morning!", "Good evening!", "Hey!"),
        ("Hello! Would you like a story, a sum or a word?", "Hello! Ask me for a story, a sum or a word."),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
        ("I am well, thank you. I am only a tiny model, but I like to tell stories.",),
    ),
    (
        ("Thank you!", "Thank you.", "Thanks!", "Thanks a lot!", "That was nice.", "Well done!", "I like that."),
        ("You are welcome!", "You are welcome! Would you like another one?"),
    ),
    (("Goodbye!", "Bye!", "Good night!", "See you later!", "I have to go now."), ("Goodbye! Come back soon.",)),
)
