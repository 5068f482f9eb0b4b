//! Each action of the agent is performed in the file of its name, so that it is found without a search.

use std::fs;
use std::path::Path;

/// The variants of the enum `Action`, in the order of its source.
fn variants(text: &str) -> Vec<&str> {
    let start = text.find("enum Action {").expect("the enum Action");
    let body = text[start..].lines().skip(1).take_while(|line| *line != "}");
    let named = body.filter(|line| line.starts_with("    ") && line[4..].starts_with(char::is_uppercase));
    named.map(|line| line.trim().split([' ', '{', ',', '(']).next().unwrap_or_default()).collect()
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}

#[test]
fn each_action_is_performed_in_the_file_of_its_name() {
    let agent = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/agent");
    let source = fs::read_to_string(agent.join("plan/action.rs")).unwrap();
    let dispatch = fs::read_to_string(agent.join("actions/mod.rs")).unwrap();
    let variants = variants(&source);
    assert!(variants.len() >= 16, "only {variants:?} were found: the check does not see them");
    let mut wrong = Vec::new();
    for variant in variants {
        let module = snake_case(variant);
        let file = agent.join("actions").join(format!("{module}.rs"));
        let performs = fs::read_to_string(&file).is_ok_and(|text| text.contains("fn perform<"));
        let arm = dispatch.lines().find(|line| {
            let rest = line.trim().strip_prefix("Action::").and_then(|line| line.strip_prefix(variant));
            rest.is_some_and(|rest| rest.starts_with(' '))
        });
        let is_dispatched = arm.is_some_and(|arm| arm.contains(&format!("=> {module}::perform(")));
        if !performs || !is_dispatched {
            wrong.push(format!("{variant}: perform() in src/agent/actions/{module}.rs, called by mod.rs"));
        }
    }
    assert!(
        wrong.is_empty(),
        "these actions are not performed in the file of their name:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn each_action_is_described_in_the_agents_page() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = fs::read_to_string(project.join("src/agent/plan/action.rs")).unwrap();
    let page = fs::read_to_string(project.join("docs/agent.md")).unwrap();
    for action in variants(&source).into_iter().map(snake_case) {
        assert!(page.contains(&format!("| `{action}`")), "the table of docs/agent.md lacks `{action}`");
    }
}

#[test]
fn the_check_of_actions_sees_variants_of_all_kinds() {
    let text = "pub enum Action {\n    SendIt {\n        /// X.\n        name: String,\n    },\n    \
                Plain,\n    Pair(u8, u8),\n}\nenum Other {\n    No,\n}\n";
    assert_eq!(variants(text), ["SendIt", "Plain", "Pair"]);
    assert_eq!(snake_case("SendIt"), "send_it");
}
