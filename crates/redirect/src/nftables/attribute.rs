//! Numbers of attributes, from `linux/netfilter/nf_tables.h`. Each struct is one `enum nft_*_attributes`;
//! the comment names it.

/// `enum nft_table_attributes`.
pub(crate) struct Table {
    pub(crate) name: u16,
    pub(crate) flags: u16,
}
pub(crate) const TABLE: Table = Table { name: 1, flags: 2 };

/// `NFT_TABLE_F_OWNER`, Linux 5.12: only the netlink socket that set it changes the table, and `nft
/// flush ruleset` of other processes leaves the table out.
pub(crate) const TABLE_OWNER: u32 = 1 << 1;

/// `NFT_TABLE_F_PERSIST`, Linux 6.9: the table stays when its owner's socket is closed.
pub(crate) const TABLE_PERSIST: u32 = 1 << 2;

/// `enum nft_set_attributes`.
pub(crate) struct Set {
    pub(crate) table: u16,
    pub(crate) name: u16,
    pub(crate) flags: u16,
    pub(crate) key_type: u16,
    pub(crate) key_len: u16,
    pub(crate) data_type: u16,
    pub(crate) data_len: u16,
    pub(crate) id: u16,
}
pub(crate) const SET: Set =
    Set { table: 1, name: 2, flags: 3, key_type: 4, key_len: 5, data_type: 6, data_len: 7, id: 10 };

/// `enum nft_chain_attributes`.
pub(crate) struct Chain {
    pub(crate) table: u16,
    pub(crate) name: u16,
    pub(crate) hook: u16,
    pub(crate) policy: u16,
    pub(crate) kind: u16,
}
pub(crate) const CHAIN: Chain = Chain { table: 1, name: 3, hook: 4, policy: 5, kind: 7 };

/// `enum nft_hook_attributes`.
pub(crate) struct Hook {
    pub(crate) number: u16,
    pub(crate) priority: u16,
    pub(crate) device: u16,
}
pub(crate) const HOOK: Hook = Hook { number: 1, priority: 2, device: 3 };

/// `enum nft_rule_attributes`, with `NFTA_LIST_ELEM` for each expression.
pub(crate) struct Rule {
    pub(crate) table: u16,
    pub(crate) chain: u16,
    pub(crate) expressions: u16,
    pub(crate) expression: u16,
}
pub(crate) const RULE: Rule = Rule { table: 1, chain: 2, expressions: 4, expression: 1 };

/// `NFTA_RULE_USERDATA`, and the type of a comment in it (`NFTNL_UDATA_RULE_COMMENT` of libnftnl).
pub(crate) const RULE_USER_DATA: u16 = 7;
pub(crate) const RULE_COMMENT: u8 = 0;

/// `enum nft_expr_attributes`.
pub(crate) struct Expression {
    pub(crate) name: u16,
    pub(crate) data: u16,
}
pub(crate) const EXPRESSION: Expression = Expression { name: 1, data: 2 };

/// `enum nft_set_elem_list_attributes`, `NFTA_LIST_ELEM` and `enum nft_set_elem_attributes`.
pub(crate) struct Element {
    pub(crate) table: u16,
    pub(crate) set: u16,
    pub(crate) elements: u16,
    pub(crate) element: u16,
    pub(crate) key: u16,
    pub(crate) data: u16,
}
pub(crate) const ELEMENT: Element = Element { table: 1, set: 2, elements: 3, element: 1, key: 1, data: 2 };

/// `enum nft_data_attributes`: `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT` and `NFTA_VERDICT_CODE`.
pub(crate) const DATA_VALUE: u16 = 1;
pub(crate) const DATA_VERDICT: u16 = 2;
pub(crate) const VERDICT_CODE: u16 = 1;
